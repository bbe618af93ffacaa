"""Sizes of engine steps and results. Pure arithmetic, without an engine."""

from __future__ import annotations

from dataclasses import dataclass

from teacher.errors import TeacherError
from teacher.records import TeacherSequence

# Peak memory per logit in vLLM's `_get_prompt_logprobs_dict`: float32 logits and float32 log-probabilities. Without a
# compiler, as on a CPU, the computation of a token's rank adds a bool and an int64 per logit. Measured on a CPU (high-
# water mark of a step, vocabulary of 152k): 17.0 bytes with float32 logits, and with bfloat16 logits at a temperature
# other than 1; 15.0 with bfloat16 logits at temperature 1.
_BYTES_PER_LOGIT_GPU = 8
_BYTES_PER_LOGIT_CPU = 17
# Memory per top-k entry: log-probability, 64-bit id, and the copies of both next to the sampled token. Measured on a
# CPU (19.3 bytes at k = vocabulary size); derived from vLLM's source on a GPU.
_BYTES_PER_LOGPROB_GPU = 32
_BYTES_PER_LOGPROB_CPU = 20

# More tokens per step gain nothing, and return results in larger, less frequent batches. On a CPU (64 sequences of 512
# tokens, k=256, vocabulary 512, one core): 0.92 s with 16384 tokens per step, 0.87 s with 4096, 0.89 s with 2048,
# 1.00 s with 1024.
_MAX_TOKENS_GPU = 16384
_MAX_TOKENS_CPU = 2048
_MAX_SEQUENCES = 256
_MIN_ROWS = 8


@dataclass(frozen=True)
class StepSize:
    """Maximum size of an engine step.

    Without a limit per sequence, vLLM gives whole steps to the first sequence. Measured with 1 sequence of 64 steps,
    followed by 50 sequences of 1/8 step each: the short ones finish after 64 to 70 steps without the limit, and after
    1 to 9 steps with it. The long one finishes after 63 steps without the limit, and after 70 with it. 64 sequences of
    1/4 step take the same time with and without the limit. A limit of 1/8 step would make them 9 % slower.

    Attributes:
        tokens: Tokens of all sequences together.
        sequences: Number of sequences.
        max_sequence_tokens: Maximum tokens of one sequence per step while other sequences wait. vLLM raises it to an
            equal share of the step if that is larger.
    """

    tokens: int
    sequences: int
    max_sequence_tokens: int


def step_size(logits_mib: int, vocab_size: int, n_logprobs: int, *, on_cpu: bool) -> StepSize:
    """Return the largest step whose logits and log-probabilities fit into ``logits_mib``.

    A step has one row of logits per token, and one more per sequence for its next token.

    Args:
        logits_mib: Memory for logits and everything computed from them, in MiB.
        vocab_size: Rows of the output layer.
        n_logprobs: Log-probabilities per position.
        on_cpu: True for a CPU, which needs more memory per logit.

    Raises:
        TeacherError: The memory holds fewer than 8 rows.
    """
    bytes_of_logits = vocab_size * (_BYTES_PER_LOGIT_CPU if on_cpu else _BYTES_PER_LOGIT_GPU)
    bytes_per_row = bytes_of_logits + n_logprobs * (_BYTES_PER_LOGPROB_CPU if on_cpu else _BYTES_PER_LOGPROB_GPU)
    rows = logits_mib * 2**20 // bytes_per_row
    if rows < _MIN_ROWS:
        raise TeacherError(
            f"LOGITS_MIB={logits_mib} holds {rows} rows of logits over a vocabulary of {vocab_size} with "
            f"N_LOGPROBS={n_logprobs}, a step needs at least {_MIN_ROWS}; "
            f"set LOGITS_MIB={-(-_MIN_ROWS * bytes_per_row // 2**20)} or more (1024 is usual)"
        )
    sequences = min(_MAX_SEQUENCES, rows // 4)
    tokens = min(rows - sequences, _MAX_TOKENS_CPU if on_cpu else _MAX_TOKENS_GPU)
    return StepSize(tokens, sequences, max(1, tokens // 4))


def result_bytes(sequence: TeacherSequence, n_logprobs: int) -> int:
    """Return the maximum host memory of one result: vLLM's rows of all tokens, and our copy of the response rows."""
    n_rows, n_scored = len(sequence.token_ids) - 1, len(sequence.token_ids) - sequence.prompt_len
    # 4 bytes each: id and log-probability of the top k and of the sampled token. vLLM adds the rank of the latter.
    return 4 * (n_rows * (2 * (n_logprobs + 1) + 1) + n_scored * (2 * n_logprobs + 1))


def capacity_tokens(step: StepSize, n_logprobs: int, max_result_bytes: int) -> int:
    """Return the tokens of two steps, or fewer if their results would exceed ``max_result_bytes``."""
    # result_bytes() is at most 16 * (n_logprobs + 1) bytes per token.
    return max(1, min(2 * step.tokens, max_result_bytes // (16 * (n_logprobs + 1))))
