"""Validation of the values of a request, by the client before it is sent and by its receivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from teacher.errors import TeacherRequestError, short
from teacher.records import TeacherSequence
from teacher.wire.limits import LIMITS, WireDtype

_SPLIT_OPTIONS = ("actor_rollout_ref.teacher.num_microbatches",)
_SPLIT_REMEDY = f"send less at once: raise {_SPLIT_OPTIONS[0]}"


def check_sequences(sequences: Sequence[TeacherSequence]) -> None:
    """Check that sequences can be sent in one request.

    Raises:
        TeacherRequestError: The count, a dtype, a shape or a length is not allowed.
    """
    if not sequences:
        raise TeacherRequestError(
            "expected at least one sequence in a request, got none",
            argument="sequences",
            remedy="do not submit empty batches",
        )
    if len(sequences) > LIMITS.sequences:
        raise TeacherRequestError(
            f"{len(sequences)} sequences in one request, at most {LIMITS.sequences} can be sent",
            argument="sequences",
            options=_SPLIT_OPTIONS,
            remedy=_SPLIT_REMEDY,
        )
    for i, sequence in enumerate(sequences):
        _check_sequence(i, sequence)
    n_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    if n_tokens > LIMITS.request_tokens:
        raise TeacherRequestError(
            f"{n_tokens} tokens in one request, at most {LIMITS.request_tokens} can be sent",
            argument="token_ids",
            options=_SPLIT_OPTIONS,
            remedy=_SPLIT_REMEDY,
        )
    n_support_ids = sum(sequence.n_scored * sequence.n_support for sequence in sequences)
    if n_support_ids > LIMITS.request_support_ids:
        raise TeacherRequestError(
            f"{n_support_ids} support ids in one request, at most {LIMITS.request_support_ids} can be sent",
            argument="support_ids_TJ",
            options=("actor_rollout_ref.teacher.student_top_k",),
            remedy="lower actor_rollout_ref.teacher.student_top_k",
        )


def _check_sequence(i: int, sequence: TeacherSequence) -> None:
    ids = sequence.token_ids
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise TeacherRequestError(
            f"token_ids must be a numpy int32 array [N], got {got}",
            sequence=i,
            argument="token_ids",
            remedy="use np.asarray(ids, np.int32)",
        )
    if len(ids) > LIMITS.sequence_tokens:
        raise TeacherRequestError(
            f"{len(ids)} tokens, at most {LIMITS.sequence_tokens} can be sent",
            sequence=i,
            argument="token_ids",
            remedy="truncate it",
        )
    if type(sequence.prompt_len) is not int or not 1 <= sequence.prompt_len < len(ids):
        raise TeacherRequestError(
            f"expected 1 <= prompt_len < number of tokens, got prompt_len={short(sequence.prompt_len):.40} with "
            f"{len(ids)} tokens: a prompt has at least one token, and an empty response cannot be scored",
            sequence=i,
            argument="prompt_len",
        )
    _check_ranges(i, sequence)
    _check_support(i, sequence)


def _check_ranges(i: int, sequence: TeacherSequence) -> None:
    ranges_R2 = sequence.scored_ranges
    if ranges_R2 is None:
        return
    is_array = isinstance(ranges_R2, np.ndarray)
    if not is_array or ranges_R2.dtype != np.int32 or ranges_R2.ndim != 2 or ranges_R2.shape[1] != 2:
        got = f"{ranges_R2.dtype} {list(ranges_R2.shape)}" if is_array else type(ranges_R2).__name__
        raise TeacherRequestError(
            f"scored_ranges must be a numpy int32 array [R, 2], got {got}", sequence=i, argument="scored_ranges"
        )
    bounds = ranges_R2.astype(np.int64).ravel()  # differences of hostile values would overflow int32
    first, end = sequence.prompt_len, len(sequence.token_ids)
    are_ordered = len(bounds) and first <= bounds[0] and bounds[-1] <= end and bool((np.diff(bounds) >= 0).all())
    if not are_ordered or not (ranges_R2[:, 0] < ranges_R2[:, 1]).all():
        raise TeacherRequestError(
            f"scored_ranges: got {short(ranges_R2.tolist())}, expected at least one range [start, end), none of them "
            f"empty, ascending and disjoint, from {first} (the end of the prompt) to {end}",
            sequence=i,
            argument="scored_ranges",
        )


def _check_support(i: int, sequence: TeacherSequence) -> None:
    support_TJ = sequence.support_ids_TJ
    if type(sequence.with_top_k) is not bool:
        raise TeacherRequestError(
            f"with_top_k must be True or False, got {short(sequence.with_top_k):.40}", sequence=i, argument="with_top_k"
        )
    if support_TJ is None:
        if not sequence.with_top_k:
            raise TeacherRequestError(
                "with_top_k=False without support_ids_TJ: no id would be scored",
                sequence=i,
                argument="with_top_k",
                remedy="set support_ids_TJ, or with_top_k=True",
            )
        return
    is_int32 = isinstance(support_TJ, np.ndarray) and support_TJ.dtype == np.int32 and support_TJ.ndim == 2
    if not is_int32 or len(support_TJ) != sequence.n_scored or not 1 <= support_TJ.shape[1] <= LIMITS.vocab_size:
        is_array = isinstance(support_TJ, np.ndarray)
        got = f"{support_TJ.dtype} {list(support_TJ.shape)}" if is_array else type(support_TJ).__name__
        raise TeacherRequestError(
            f"support_ids_TJ must be a numpy int32 array [T, J] of the {sequence.n_scored} scored tokens, got {got}",
            sequence=i,
            argument="support_ids_TJ",
        )
    if support_TJ.min() < -1:
        raise TeacherRequestError(
            f"support_ids_TJ: got the token id {support_TJ.min()}, expected token ids, or -1 for an unused entry",
            sequence=i,
            argument="support_ids_TJ",
        )


def check_temperature(temperature: Any) -> float:
    """Return a temperature as float.

    Raises:
        TeacherRequestError: It is not a number within the limits.
    """
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if is_number and LIMITS.min_temperature <= temperature <= LIMITS.max_temperature:  # False for NaN
        return float(temperature)
    raise TeacherRequestError(
        f"temperature must be a number from {LIMITS.min_temperature:g} to {LIMITS.max_temperature:g}, "
        f"got {short(temperature):.40}",
        argument="temperature",
        options=("gkd.distill_temperature",),
        remedy="correct gkd.distill_temperature",
    )


def check_top_k(top_k: Any) -> int:
    """Return ``top_k`` as it is sent: 0 for None.

    Raises:
        TeacherRequestError: It is neither None nor an integer within the limits.
    """
    if top_k is None:
        return 0
    if type(top_k) is int and 1 <= top_k <= LIMITS.vocab_size:
        return top_k
    raise TeacherRequestError(
        f"top_k must be 1 to {LIMITS.vocab_size}, or None for all that the teacher returns, got {short(top_k):.40}",
        argument="top_k",
        options=("actor_rollout_ref.teacher.top_k",),
        remedy="correct actor_rollout_ref.teacher.top_k",
    )


def check_wire_dtype(wire_dtype: Any) -> WireDtype:
    """Return the wire dtype.

    Raises:
        TeacherRequestError: It is not one of ``WireDtype``.
    """
    for allowed in get_args(WireDtype):
        if wire_dtype == allowed:
            return allowed
    raise TeacherRequestError(
        f"wire_dtype must be float32 or float16, got {short(wire_dtype):.40}",
        argument="wire_dtype",
        options=("actor_rollout_ref.teacher.wire_dtype",),
        remedy="correct actor_rollout_ref.teacher.wire_dtype",
    )
