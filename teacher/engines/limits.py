"""Validation of one sequence against the limits of a served model."""

from __future__ import annotations

from teacher.engines.sizes import ResultMemory
from teacher.errors import TeacherRequestError
from teacher.records import ModelInfo, TeacherSequence


def check_sequence(sequence: TeacherSequence, info: ModelInfo, memory: ResultMemory) -> None:
    """Validate length, token ids and result size of a sequence.

    Args:
        sequence: Sequence to validate.
        info: Model and limits.
        memory: Memory for results.

    Raises:
        TeacherRequestError: The sequence is too long, has an id outside the vocabulary, or its result is too large.
    """
    ids = sequence.token_ids
    if len(ids) > info.max_model_len:
        raise TeacherRequestError(
            f"{len(ids)} tokens, the teacher takes at most {info.max_model_len}; start it with a larger "
            "MAX_MODEL_LEN, or shorten prompt and response"
        )
    if ids.min() < 0 or ids.max() >= info.n_tokens:
        bad = ids[(ids < 0) | (ids >= info.n_tokens)]
        raise TeacherRequestError(
            f"token id {bad[0]} is outside the teacher's vocabulary of {info.n_tokens}; student and teacher must "
            "share one tokenizer"
        )
    if (n_bytes := memory.bytes_of(sequence)) > memory.max_bytes:
        raise TeacherRequestError(
            f"the result of {len(ids)} tokens, {len(ids) - sequence.prompt_len} of them scored, takes "
            f"{n_bytes / 2**20:.1f} MiB of the teacher's memory with N_LOGPROBS={info.n_logprobs}, the limit is "
            f"MAX_RESULT_MIB={memory.max_bytes >> 20}; shorten prompt or response, or start the teacher with a smaller "
            "N_LOGPROBS or a larger MAX_RESULT_MIB (a request's top_k does not change the engine's work)"
        )
