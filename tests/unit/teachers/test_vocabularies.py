"""Comparison of the vocabularies of student and teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.errors import VocabularyMismatch
from recipe_gkd.model_files import Student
from recipe_gkd.teachers.vocabularies import check_vocabulary
from teacher.common.fingerprint import count_ids, last_tokens, tokenizer_fingerprint
from teacher.records import TeacherInfo
from tests._support.errors import raises

N_BASE = count_ids(build_tokenizer())


def tokenizer(*added: str) -> Any:
    found = build_tokenizer()
    found.add_tokens(list(added))
    return found


def student(*added: str) -> Student:
    own = tokenizer(*added)
    return Student(Path("student"), 128, own, tokenizer_fingerprint(own), n_tokens=count_ids(own))


def teacher(*added: str, eos: tuple[int, ...] = (1,), n_logprobs: int = 8, **differences: Any) -> TeacherInfo:
    own = tokenizer(*added)
    values: dict[str, Any] = {
        "model_name": "m",
        "vocab_size": 128,
        "n_tokens": count_ids(own),
        "tokenizer_fingerprint": tokenizer_fingerprint(own),
        "max_model_len": 64,
        "n_logprobs": n_logprobs,
        "engine": "none",
        "eos_token_ids": eos,
        "protocol_version": 8,
        "n_workers": 1,
        "last_tokens": last_tokens(own),
    }
    return TeacherInfo(**(values | differences))


def test_equal_vocabularies_need_no_restriction() -> None:
    assert check_vocabulary("t", teacher("<think>"), student("<think>"), "compatible") == 0


@pytest.mark.parametrize("n_added", [1, 3, 200])
def test_further_tokens_of_the_teacher_are_accepted_with_the_key(n_added: int) -> None:
    added = [f"<extra{n}>" for n in range(n_added)]
    assert check_vocabulary("t", teacher("<a>", *added), student("<a>"), "compatible") == N_BASE + 1


def test_further_tokens_of_the_teacher_are_named_with_the_key_that_accepts_them() -> None:
    key = "actor_rollout_ref.teacher.vocabulary"
    with raises(VocabularyMismatch, keys=(key,), ids=tuple(range(N_BASE, N_BASE + 7))) as caught:
        check_vocabulary("t", teacher(*(f"<e{n}>" for n in range(7))), student(), "equal")
    listed = ", ".join(f"{N_BASE + n} '<e{n}>'" for n in range(5))
    assert caught.value.what.endswith(f"{listed}, ... (7 in all)"), "the list is short"


@pytest.mark.parametrize(
    ("of_teacher", "of_student", "ids"),
    [
        ((), ("<a>", "<b>"), (N_BASE, N_BASE + 1)),
        (("<a>", "<b>"), ("<a>", "<c>"), (N_BASE + 1,)),
        (("<b>", "<more>"), ("<a>",), (N_BASE,)),
    ],
)
def test_other_vocabularies_are_refused_with_the_tokens_that_differ(
    of_teacher: tuple[str, ...], of_student: tuple[str, ...], ids: tuple[int, ...]
) -> None:
    for accepted in ("equal", "compatible"):
        with raises(VocabularyMismatch, keys=(), ids=ids):
            check_vocabulary("t", teacher(*of_teacher), student(*of_student), accepted)  # type: ignore[arg-type]


def test_unknown_tokens_are_refused_as_another_family() -> None:
    unknown = teacher("<b>", tokenizer_fingerprint="sha256:other", last_tokens=())
    with raises(VocabularyMismatch, keys=(), ids=()):
        check_vocabulary("t", unknown, student(), "compatible")


def test_end_of_turn_among_the_further_tokens_is_accepted_only_there() -> None:
    assert check_vocabulary("t", teacher("<end>", eos=(1, N_BASE)), student(), "compatible") == N_BASE
    with raises(VocabularyMismatch, keys=(), ids=(N_BASE,)):
        check_vocabulary("t", teacher(eos=(N_BASE,)), student(), "compatible")


def test_more_log_probabilities_than_ids_are_refused() -> None:
    with raises(VocabularyMismatch, keys=("N_LOGPROBS",), ids=()):
        check_vocabulary("t", teacher("<a>", n_logprobs=N_BASE + 1), student(), "compatible")
