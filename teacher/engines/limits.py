"""Validation of one sequence against the limits of a served model."""

from __future__ import annotations

from teacher.common.sizes import MIB
from teacher.engines.sizes import ResultMemory
from teacher.errors import TeacherRequestError
from teacher.records import ModelInfo, TeacherSequence


def check_sequence(sequence: TeacherSequence, n_ids: int, info: ModelInfo, memory: ResultMemory) -> None:
    """Validate length, token ids and result size of a sequence, and the number of ids of its request.

    Args:
        sequence: Sequence to validate.
        n_ids: Number of ids with a probability, 0 for all of the model.
        info: Model and limits.

    Raises:
        TeacherRequestError: The sequence is too long, has an id outside the vocabulary, or its result is too large; or
            the model has fewer ids than requested, or returns more log-probabilities.
    """
    if n_ids and not info.n_logprobs <= n_ids <= info.n_tokens:
        raise TeacherRequestError(
            f"the request has {n_ids} ids with a probability, expected at least N_LOGPROBS={info.n_logprobs} and at "
            f"most the {info.n_tokens} ids of the teacher",
            argument="n_ids",
            options=("N_LOGPROBS",),
            remedy="start it with a smaller N_LOGPROBS, or use another teacher",
        )
    ids = sequence.token_ids
    if len(ids) > info.max_model_len:
        raise TeacherRequestError(
            f"{len(ids)} tokens, the teacher takes at most {info.max_model_len}",
            argument="token_ids",
            options=("MAX_MODEL_LEN",),
            remedy="start it with a larger MAX_MODEL_LEN, or shorten prompt and response",
        )
    n_allowed = n_ids or info.n_tokens
    if ids.min() < 0 or ids.max() >= n_allowed:
        bad = ids[(ids < 0) | (ids >= n_allowed)]
        vocabulary = "the vocabulary of the request" if n_ids else "the teacher's vocabulary"
        raise TeacherRequestError(
            f"token id {bad[0]} is outside {vocabulary} of {n_allowed}: student and teacher must share one tokenizer",
            argument="token_ids",
        )
    _check_support(sequence, n_allowed, info)
    if (n_bytes := memory.bytes_of(sequence)) > memory.max_bytes:
        raise TeacherRequestError(
            f"the result of {len(ids)} tokens, {sequence.n_scored} of them scored, takes "
            f"{n_bytes / MIB:.1f} MiB of the teacher's memory with N_LOGPROBS={info.n_logprobs}, the limit is "
            f"MAX_RESULT_MIB={memory.max_bytes >> 20}",
            argument="token_ids",
            options=("N_LOGPROBS", "MAX_RESULT_MIB"),
            remedy="shorten prompt or response, send fewer support ids (actor_rollout_ref.teacher.student_top_k), or "
            "start the teacher with a smaller N_LOGPROBS or a larger MAX_RESULT_MIB (a request's top_k does not change "
            "the engine's work)",
        )


def _check_support(sequence: TeacherSequence, n_allowed: int, info: ModelInfo) -> None:
    if sequence.support_ids_TJ is None:
        return
    if sequence.n_support > info.n_logprobs:
        raise TeacherRequestError(
            f"{sequence.n_support} support ids of a position, the teacher scores at most {info.n_logprobs}",
            argument="support_ids_TJ",
            options=("actor_rollout_ref.teacher.student_top_k", "N_LOGPROBS"),
            remedy="lower actor_rollout_ref.teacher.student_top_k, or start the teacher with a larger N_LOGPROBS",
        )
    if (largest := sequence.support_ids_TJ.max()) >= n_allowed:
        raise TeacherRequestError(
            f"support id {largest} is outside the teacher's vocabulary of {n_allowed}: student and teacher must share "
            "one tokenizer",
            argument="support_ids_TJ",
        )
