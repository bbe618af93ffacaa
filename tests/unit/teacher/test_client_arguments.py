"""Arguments of the client: accepted forms, errors that name them, and the examples of docs/teacher_service.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from teacher import TeacherClient, TeacherRequestError, TeacherSequence
from teacher.client.arguments import normalize_sequences
from tests._support.errors import raises
from tests._support.fake_worker import FakeEngine, expected_scores, running_worker
from tests._support.repository import REPO
from tests._support.teacher_service import running_proxy

VALID = TeacherSequence([9, 8, 7], prompt_len=1)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port of a service with a fake engine."""
    with running_proxy() as proxy, running_worker(proxy.backend_port, FakeEngine()):
        yield proxy.frontend_port


def client_examples() -> list[str]:
    page = (REPO / "docs" / "teacher_service.md").read_text(encoding="utf-8")
    section = page.split("## The Python client\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", [0, 1])
def test_documented_client_example_runs(index: int, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    examples = client_examples()
    assert len(examples) == 2 and '"127.0.0.1", 15555' in examples[index]
    exec(compile(examples[index].replace("15555", str(port)), f"example_{index}", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    expected = ["fake 100 32 1", "sequence 0: token_ids: got a float64 array of shape [2], expected integers >= 0"]
    assert expected[index] in printed


@pytest.mark.parametrize(
    "token_ids",
    [[9, 8, 7], (9, 8, 7), range(9, 6, -1), np.array([9, 8, 7]), np.array([9, 8, 7], np.uint8), VALID.token_ids],
    ids=["list", "tuple", "range", "int64", "uint8", "int32"],
)
def test_submit_accepts_any_integers(token_ids: Any, port: int) -> None:
    with TeacherClient(server_port=port, timeout_s=20) as client:
        (scored,) = client.submit([TeacherSequence(token_ids, np.int64(1))]).result()  # type: ignore[arg-type]
    np.testing.assert_array_equal(scored.topk_ids_TK, expected_scores(VALID).topk_ids_TK)


@pytest.mark.parametrize("top_k", [None, 2])
def test_support_ids_are_scored_beside_or_instead_of_the_top_k(top_k: int | None, port: int) -> None:
    both = TeacherSequence([9, 8, 7], 1, support_ids_TJ=[[3, -1], [5, 8]])
    alone = TeacherSequence([9, 8, 7], 1, support_ids_TJ=np.array([[3], [5]]), with_top_k=False)
    with TeacherClient(server_port=port, timeout_s=20, top_k=top_k) as client:
        scored = client.submit([VALID, both, alone]).result()
    for sequence, result in zip(normalize_sequences([VALID, both, alone]), scored, strict=True):
        want = expected_scores(sequence).reduced(top_k or 0, "float32")
        np.testing.assert_array_equal(result.topk_ids_TK, want.topk_ids_TK)
        np.testing.assert_array_equal(result.topk_logps_TK, want.topk_logps_TK)
        assert (result.support_logps_TJ is None) == (sequence is VALID)
        if want.support_logps_TJ is not None:
            np.testing.assert_array_equal(result.support_logps_TJ, want.support_logps_TJ)


@pytest.mark.parametrize(
    "support_ids_TJ", [[3, 4], [[0.5], [1]], [[1], [-2]], [[1, 2], [3]], [[1], [1 << 40]], [["a"], ["b"]]]
)
def test_invalid_support_ids_are_named(support_ids_TJ: Any) -> None:
    with raises(TeacherRequestError, sequence=1, argument="support_ids_TJ"):
        normalize_sequences([VALID, TeacherSequence([9, 8, 7], 1, support_ids_TJ=support_ids_TJ)])


def test_normalize_sequences_keeps_valid_sequences() -> None:
    assert VALID.token_ids.dtype == np.int32
    assert normalize_sequences(iter([VALID]))[0] is VALID


@pytest.mark.parametrize(("sequences", "wrong"), [(VALID, None), (3, None), ([VALID, [9, 8, 7]], 1), ([], None)])
def test_submit_invalid_collection_error_names_it(sequences: Any, wrong: int | None, port: int) -> None:
    refused = raises(TeacherRequestError, argument="sequences", sequence=wrong)
    with TeacherClient(server_port=port) as client, refused:
        client.submit(sequences).result(timeout=60)


@pytest.mark.parametrize(
    ("token_ids", "prompt_len", "argument"),
    [
        (np.zeros(3, np.float32), 1, "token_ids"),
        ([0.5, 2], 1, "token_ids"),
        ([[1, 2], [3, 4]], 1, "token_ids"),
        ([[1, 2], [3]], 1, "token_ids"),
        (["a", "b"], 1, "token_ids"),
        ([True, False], 1, "token_ids"),
        ([1, -1], 1, "token_ids"),
        ([1, 1 << 40], 1, "token_ids"),
        ([1, 1 << 70], 1, "token_ids"),
        ([], 1, "token_ids"),
        ([1, 2], 2, "prompt_len"),
        ([1, 2], 0, "prompt_len"),
        ([1, 2], 1.0, "prompt_len"),
        ([1, 2], True, "prompt_len"),
    ],
)
def test_normalize_sequences_error_names_argument(token_ids: Any, prompt_len: Any, argument: str) -> None:
    with raises(TeacherRequestError, sequence=3, argument=argument):
        normalize_sequences([VALID, VALID, VALID, TeacherSequence(token_ids, prompt_len)])
