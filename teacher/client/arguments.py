"""Conversion and checks of the sequences given to a client. Errors have its position and argument as fields."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from teacher.errors import TeacherRequestError
from teacher.records import TeacherSequence

_MAX_ID = np.iinfo(np.int32).max


def normalize_sequences(sequences: Iterable[TeacherSequence]) -> list[TeacherSequence]:
    """Return the sequences with int32 token ids. A sequence that has them already is not copied.

    Raises:
        TeacherRequestError: ``sequences`` is no collection of `TeacherSequence`, or a value of one is invalid.
    """
    if isinstance(sequences, TeacherSequence):
        raise TeacherRequestError(
            "sequences: got one TeacherSequence, expected a list of them",
            argument="sequences",
            remedy="write [sequence] instead of sequence",
        )
    if not isinstance(sequences, Iterable):
        raise TeacherRequestError(
            f"sequences: got {type(sequences).__name__}, expected a list of TeacherSequence", argument="sequences"
        )
    return [_normalize(i, sequence) for i, sequence in enumerate(sequences)]


def _normalize(i: int, sequence: TeacherSequence) -> TeacherSequence:
    if not isinstance(sequence, TeacherSequence):
        raise TeacherRequestError(
            f"got {type(sequence).__name__}, expected teacher.TeacherSequence(token_ids, prompt_len)",
            sequence=i,
            argument="sequences",
        )
    token_ids, prompt_len = sequence.token_ids, sequence.prompt_len
    _check_ids(i, token_ids)
    if isinstance(prompt_len, bool) or not isinstance(prompt_len, int | np.integer):
        raise TeacherRequestError(
            f"prompt_len: got {type(prompt_len).__name__} {prompt_len!r:.40}, expected the number of prompt tokens "
            "as an integer",
            sequence=i,
            argument="prompt_len",
        )
    if not 1 <= prompt_len < len(token_ids):
        raise TeacherRequestError(
            f"prompt_len: got {prompt_len} for {len(token_ids)} token_ids, expected 1 <= prompt_len < "
            f"{len(token_ids)}: prompt and response have at least one token each",
            sequence=i,
            argument="prompt_len",
        )
    support_ids_TJ = sequence.support_ids_TJ
    if support_ids_TJ is not None:
        support_ids_TJ = _as_support(i, support_ids_TJ)
    ranges_R2 = sequence.scored_ranges
    if ranges_R2 is not None and ranges_R2.dtype != np.int32 and np.issubdtype(ranges_R2.dtype, np.integer):
        # `check_sequences` refuses the others, and bounds outside of the sequence.
        ranges_R2 = ranges_R2.clip(-1, _MAX_ID).astype(np.int32)
    is_normal = support_ids_TJ is sequence.support_ids_TJ and ranges_R2 is sequence.scored_ranges
    if token_ids.dtype == np.int32 and type(prompt_len) is int and is_normal:
        return sequence
    return TeacherSequence(
        token_ids.astype(np.int32, copy=False),
        int(prompt_len),
        scored_ranges=ranges_R2,
        support_ids_TJ=support_ids_TJ,
        with_top_k=sequence.with_top_k,
    )


def _as_support(i: int, support_ids_TJ: np.ndarray) -> np.ndarray:
    """Return support ids as int32. ``check_sequences`` compares their shape with the response."""
    is_valid = np.issubdtype(support_ids_TJ.dtype, np.integer) and support_ids_TJ.ndim == 2
    if is_valid and support_ids_TJ.size:
        is_valid = bool(-1 <= support_ids_TJ.min() <= support_ids_TJ.max() <= _MAX_ID)
    if not is_valid:
        raise TeacherRequestError(
            f"support_ids_TJ: got a {support_ids_TJ.dtype.name} array of shape {list(support_ids_TJ.shape)}, expected "
            f"integers from -1 to {_MAX_ID} in two dimensions [T, J]",
            sequence=i,
            argument="support_ids_TJ",
        )
    return support_ids_TJ.astype(np.int32, copy=False)


def _check_ids(i: int, token_ids: np.ndarray) -> None:
    if not np.issubdtype(token_ids.dtype, np.integer) or token_ids.ndim != 1:
        kind = token_ids.dtype.name if token_ids.dtype != object else "mixed"
        raise TeacherRequestError(
            f"token_ids: got a {kind} array of shape {list(token_ids.shape)}, expected integers >= 0 in one dimension "
            "[N]",
            sequence=i,
            argument="token_ids",
        )
    if len(token_ids) < 2:
        raise TeacherRequestError(
            f"token_ids: got {len(token_ids)} tokens, expected at least 2: prompt and response have at least one each",
            sequence=i,
            argument="token_ids",
        )
    if (low := token_ids.min()) < 0 or (high := token_ids.max()) > _MAX_ID:
        bad = low if low < 0 else high
        raise TeacherRequestError(
            f"token_ids: got the token id {bad}, expected integers from 0 to {_MAX_ID}",
            sequence=i,
            argument="token_ids",
        )
