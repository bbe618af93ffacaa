"""Arguments of the client: accepted forms, errors that name them, and the examples of docs/teacher.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from teacher import TeacherClient, TeacherRequestError, TeacherSequence
from teacher.client.arguments import normalize_sequences
from tests._support.fake_worker import FakeEngine, expected_scores, running_worker
from tests._support.repository import REPO
from tests._support.teacher_service import running_proxy

pytestmark = pytest.mark.timeout(30)
VALID = TeacherSequence([9, 8, 7], prompt_len=1)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Port of a service with a fake engine."""
    with running_proxy() as proxy, running_worker(proxy.backend_port, FakeEngine()):
        yield proxy.frontend_port


def client_examples() -> list[str]:
    page = (REPO / "docs" / "teacher.md").read_text(encoding="utf-8")
    section = page.split("## The Python client\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", [0, 1])
def test_documented_client_example_runs(index: int, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    examples = client_examples()
    assert len(examples) == 2 and '"127.0.0.1", 15555' in examples[index]
    exec(compile(examples[index].replace("15555", str(port)), f"example_{index}", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    expected = ["fake 100 32 1", "sequences[0].token_ids: got a float64 array of shape [2]; expected integers >= 0"]
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


def test_normalize_sequences_keeps_valid_sequences() -> None:
    assert VALID.token_ids.dtype == np.int32
    assert normalize_sequences(iter([VALID]))[0] is VALID


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (VALID, r"sequences: got one TeacherSequence, expected a list of them; write \[sequence\]"),
        (3, "sequences: got int, expected a list of TeacherSequence"),
        ([VALID, [9, 8, 7]], r"sequences\[1\]: got list, expected teacher.TeacherSequence"),
        ([], "expected at least one sequence"),
    ],
)
def test_submit_invalid_collection_error_names_it(sequences: Any, message: str, port: int) -> None:
    with TeacherClient(server_port=port) as client, pytest.raises(TeacherRequestError, match=f"^{message}"):
        client.submit(sequences).result(timeout=5)


@pytest.mark.parametrize(
    ("token_ids", "prompt_len", "message"),
    [
        (np.zeros(3, np.float32), 1, r"token_ids: got a float32 array of shape \[3\]; expected integers >= 0"),
        ([0.5, 2], 1, r"token_ids: got a float64 array of shape \[2\]; expected integers >= 0"),
        ([[1, 2], [3, 4]], 1, r"token_ids: got a int\d+ array of shape \[2, 2\]; expected integers >= 0 in one dim"),
        ([[1, 2], [3]], 1, r"token_ids: got a mixed array"),
        (["a", "b"], 1, r"token_ids: got a str"),
        ([True, False], 1, r"token_ids: got a bool array"),
        ([1, -1], 1, r"token_ids: got the token id -1; expected integers from 0 to"),
        ([1, 1 << 40], 1, rf"token_ids: got the token id {1 << 40}; expected"),
        ([1, 1 << 70], 1, r"token_ids: got a mixed array"),
        ([], 1, r"token_ids: got 0 tokens; expected at least 2"),
        ([1, 2], 2, r"prompt_len: got 2 for 2 token_ids; expected 1 <= prompt_len < 2"),
        ([1, 2], 0, r"prompt_len: got 0 for 2 token_ids"),
        ([1, 2], 1.0, r"prompt_len: got float 1.0; expected the number of prompt tokens"),
        ([1, 2], True, r"prompt_len: got bool True; expected"),
    ],
)
def test_normalize_sequences_error_names_argument(token_ids: Any, prompt_len: Any, message: str) -> None:
    with pytest.raises(TeacherRequestError, match=rf"^sequences\[3\]\.{message}"):
        normalize_sequences([VALID, VALID, VALID, TeacherSequence(token_ids, prompt_len)])
