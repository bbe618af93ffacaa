"""How much one engine step takes, and what one answer costs: numbers only, no engine."""

from __future__ import annotations

from dataclasses import dataclass

from teacher.errors import TeacherError
from teacher.records import TeacherSequence

# Of one logit, at the peak of vLLM's `_get_prompt_logprobs_dict`: fp32 logits and fp32 logprobs. Without a compiler, as
# on our CPUs, counting larger logprobs (the token's rank) makes a bool and an int64 of each besides. Measured there, by
# the high-water mark of a step at a vocabulary of 152k: 17.0 in float32 and in bf16 at a temperature, else 15.0.
_BYTES_PER_LOGIT_GPU = 8
_BYTES_PER_LOGIT_CPU = 17
# Of one of the top k: its logprob, its id in 64 bits, and the copies of both beside the token that is there. Measured
# on a CPU (19.3 at k = vocabulary); on a GPU by vLLM's source only.
_BYTES_PER_LOGPROB_GPU = 32
_BYTES_PER_LOGPROB_CPU = 20

# More tokens in a step gain nothing, and let answers leave in larger, rarer lumps. On a CPU (64 sequences of 512,
# k=256, vocabulary 512, one core): 0.92 s in steps of 16384 tokens, 0.87 of 4096, 0.89 of 2048, 1.00 of 1024.
_MAX_TOKENS_GPU = 16384
_MAX_TOKENS_CPU = 2048
_MAX_SEQUENCES = 256
_MIN_ROWS = 8


@dataclass(frozen=True)
class StepSize:
    """`long_tokens`: what one sequence may take of a step while there are others; a fair share if that is more.

    Without it vLLM gives whole steps to whoever came first. Measured: a sequence of 64 steps goes in, then 50 of an
    eighth of a step each. The short ones come out after 64 to 70 steps without it, after 1 to 9 with it; the long one
    after 63 and 70, and after 63 either way if it is alone. 64 sequences of a quarter of a step take as long as without
    (with an eighth of a step as the share, and so more and smaller pieces, 9 % longer).
    """

    tokens: int
    sequences: int
    long_tokens: int


def step_size(logits_mib: int, vocab_size: int, n_logprobs: int, *, on_cpu: bool) -> StepSize:
    """The largest step whose logits, and the logprobs taken from them, stay within `logits_mib`.

    A step has a row of logits for each of its tokens, and for each of its sequences one more, to continue it from.

    Raises: TeacherError if not even a few rows fit.
    """
    of_logits = vocab_size * (_BYTES_PER_LOGIT_CPU if on_cpu else _BYTES_PER_LOGIT_GPU)
    bytes_per_row = of_logits + n_logprobs * (_BYTES_PER_LOGPROB_CPU if on_cpu else _BYTES_PER_LOGPROB_GPU)
    rows = logits_mib * 2**20 // bytes_per_row
    if rows < _MIN_ROWS:
        raise TeacherError(
            f"LOGITS_MIB={logits_mib} holds {rows} rows of logits over a vocabulary of {vocab_size} with "
            f"N_LOGPROBS={n_logprobs}, a step needs "
            f"{_MIN_ROWS} at least; set LOGITS_MIB={-(-_MIN_ROWS * bytes_per_row // 2**20)} or more (1024 is usual)"
        )
    sequences = min(_MAX_SEQUENCES, rows // 4)
    tokens = min(rows - sequences, _MAX_TOKENS_CPU if on_cpu else _MAX_TOKENS_GPU)
    return StepSize(tokens, sequences, max(1, tokens // 4))


def answer_bytes(sequence: TeacherSequence, n_logprobs: int) -> int:
    """Host memory for one answer at its largest: vLLM's rows of all tokens, and our copy of the response's."""
    n_rows, n_scored = len(sequence.token_ids) - 1, len(sequence.token_ids) - sequence.prompt_len
    # 4 bytes each: id and logprob of the top k and of the token that is there; vLLM adds its rank.
    return 4 * (n_rows * (2 * (n_logprobs + 1) + 1) + n_scored * (2 * n_logprobs + 1))


def capacity_tokens(step: StepSize, n_logprobs: int, max_answer_bytes: int) -> int:
    """Two steps of work: one is computed, the next is there. Less if their answers would be too large."""
    return max(1, min(2 * step.tokens, max_answer_bytes // (16 * (n_logprobs + 1))))
