"""Comparison of the vocabularies of student and teacher.

Top-k distillation compares two distributions id by id, so each id must be the same token in both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.schema.teacher import TeacherVocabulary
from recipe_gkd.errors import VocabularyMismatch
from recipe_gkd.model_files import Student
from teacher.common.fingerprint import count_ids, last_tokens
from teacher.records import LastToken, TeacherInfo

log = logging.getLogger(__name__)

SHOWN_TOKENS = 5
"""Number of tokens in a message."""


def check_vocabulary(label: str, info: TeacherInfo, student: Student, accepted: TeacherVocabulary) -> int:
    """Check that each id of the student is the same token for a teacher.

    Args:
        label: Teacher, for messages.
        info: Description of the teacher.
        accepted: ``teacher.vocabulary``.

    Returns:
        Number of ids to which the teacher's distributions must be restricted. 0: both vocabularies are equal.

    Raises:
        VocabularyMismatch: The vocabularies do not fit.
    """
    n_ids = 0
    if info.tokenizer_fingerprint != student.fingerprint:
        further = _further_tokens(info, student)
        if further is None or accepted != "compatible":
            raise _difference(label, info, student, further)
        n_ids = student.n_tokens
        log.info("%s: the ids from %d on have no probability: %s", label, n_ids, _listed(further))
    if info.n_tokens < student.n_tokens:
        raise VocabularyMismatch(
            f"{label} accepts the ids 0 to {info.n_tokens - 1} of the tokenizer, because its output layer has "
            f"{info.vocab_size} rows, but responses of the student {student.path} contain ids up to "
            f"{student.n_tokens - 1}",
            ids=tuple(range(info.n_tokens, student.n_tokens)),
            remedy="choose a teacher checkpoint whose output layer covers the tokenizer",
        )
    invalid = [token for token in info.eos_token_ids if token >= student.n_tokens]
    if invalid and not n_ids:
        raise VocabularyMismatch(
            f"{label} ends a turn with the ids {invalid}, but the student {student.path} has only ids 0 to "
            f"{student.n_tokens - 1}",
            ids=tuple(invalid),
            remedy="correct eos_token_id in the teacher's generation_config.json",
        )
    if n_ids and n_ids < info.n_logprobs:
        raise VocabularyMismatch(
            f"{label} returns N_LOGPROBS={info.n_logprobs} ids per position, but the student {student.path} has only "
            f"{n_ids}",
            keys=("N_LOGPROBS",),
            remedy="start the teacher with a smaller N_LOGPROBS",
        )
    return n_ids


def _further_tokens(info: TeacherInfo, student: Student) -> Sequence[LastToken] | None:
    """Return the teacher's tokens after the student's. None if the ids of the student are other tokens there."""
    n_ids = count_ids(student.tokenizer)
    further = [token for token in info.last_tokens if token.id >= n_ids]
    return further if further and further[0].fingerprint == student.fingerprint else None


def _difference(
    label: str, info: TeacherInfo, student: Student, further: Sequence[LastToken] | None
) -> VocabularyMismatch:
    """Return the error of vocabularies that differ, with the tokens that do."""
    n_ids = count_ids(student.tokenizer)
    found = (
        f"the teacher's vocabulary does not fit the student's: {label} has {info.n_tokens} ids (tokenizer "
        f"{info.tokenizer_fingerprint}), student {student.path} has {student.n_tokens} (tokenizer "
        f"{student.fingerprint})"
    )
    if further is not None:
        key = f"{TEACHER}.vocabulary"
        return VocabularyMismatch(
            f"{found}. The first {n_ids} ids are equal, and the teacher has further ones: {_listed(further)}",
            keys=(key,),
            ids=_ids(further),
            remedy=f"set {key}=compatible to exclude them from the teacher's distributions",
        )
    own = last_tokens(student.tokenizer)
    beyond = [token for token in own if token.fingerprint == info.tokenizer_fingerprint]
    if beyond:
        tokens = [token for token in own if token.id >= beyond[0].id]
        return VocabularyMismatch(
            f"{found}. The student has tokens that the teacher does not have and cannot score: {_listed(tokens)}",
            ids=_ids(tokens),
            remedy="remove them from the student, or add them to the teacher",
        )
    texts = {token.id: token.text for token in info.last_tokens}
    is_same_until = {token.id: token.fingerprint for token in info.last_tokens}
    others = [token for token in own if token.id in texts and texts[token.id] != token.text]
    if others and is_same_until[others[0].id] == others[0].fingerprint:
        pairs = [
            f"{token.id} is {texts[token.id]!r} for the teacher and {token.text!r} for the student" for token in others
        ]
        first = "; ".join(pairs[:SHOWN_TOKENS]) + ("; ..." if len(pairs) > SHOWN_TOKENS else "")
        return VocabularyMismatch(
            f"{found}. {first}. An id must be the same token in both",
            ids=_ids(others),
            remedy="give both the same added tokens",
        )
    recorded = (
        "" if info.last_tokens else f"; a recording must be made with this student and {TEACHER}.vocabulary=compatible"
    )
    return VocabularyMismatch(
        f"{found}. An id must be the same token in both",
        remedy=f"choose a teacher and a student of one model family, with their original tokenizer files{recorded}",
    )


def _ids(tokens: Sequence[LastToken]) -> tuple[int, ...]:
    return tuple(token.id for token in tokens)


def _listed(tokens: Sequence[LastToken]) -> str:
    """Return ids and texts of the first tokens."""
    shown = ", ".join(f"{token.id} {token.text!r}" for token in tokens[:SHOWN_TOKENS])
    return f"{shown}, ... ({len(tokens)} in all)" if len(tokens) > SHOWN_TOKENS else shown
