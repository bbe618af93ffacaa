"""Sizes of engine steps and results. Pure arithmetic, without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from teacher.common.sizes import MIB
from teacher.errors import TeacherSetupError
from teacher.records import TeacherSequence

ModelRunner = Literal["cpu", "cuda_v1", "cuda_v2"]
"""vLLM's model runners: V1 on a CPU, and on CUDA V2 (the default) or V1 (``VLLM_USE_V2_MODEL_RUNNER=0``)."""

# Peak memory per logit with the V1 runner (`vllm_prompt_rows`): float32 log-probabilities, and 16-bit logits with their
# float32 copy, or float32 logits. Measured on a CPU (high-water mark, 256 rows of 152k): 8.1 bytes with float32 logits,
# 10.0 with bfloat16 logits.
_BYTES_PER_LOGIT_V1 = 10
# Memory per top-k entry and a support id: log-probabilities, 64-bit ids, and the copies of both next to the sampled
# token. Measured on a CPU (8,000 entries of a row): 32.4 bytes without support ids, 52.6 with as many. Derived from
# vLLM's source for V2, which computes them one after the other.
_BYTES_PER_LOGPROB_V1 = 56
_BYTES_PER_LOGPROB_V2 = 32
# V2 keeps the rows of a step until all are computed, and then joins them: twice a log-probability and a 64-bit id.
_BYTES_PER_JOINED_LOGPROB_V2 = 24

# More tokens per step gain nothing, and return results in larger, less frequent batches. On a CPU (64 sequences of 512
# tokens, k=256, vocabulary 512, one core): 0.92 s with 16384 tokens per step, 0.87 s with 4096, 0.89 s with 2048,
# 1.00 s with 1024. On CUDA (not measured) a step of 8192 tokens takes longer than the launch of its kernels, and vLLM's
# own default for throughput is 8192 or more. Larger steps take activation memory from the KV cache.
_MAX_TOKENS_CPU = 2048
_MAX_TOKENS_CUDA = 8192
_MAX_SEQUENCES = 256
_MIN_ROWS = 8
MAX_LOGIT_ROWS_V2 = 1024
"""Rows of logits that V2 computes at a time (``CHUNK_SIZE`` of ``v1/worker/gpu/sample/prompt_logprob.py``)."""


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
        logit_rows: Rows of logits that exist at a time.
    """

    tokens: int
    sequences: int
    max_sequence_tokens: int
    logit_rows: int


@dataclass(frozen=True)
class StepMemory:
    """Memory that a model runner needs for the logits of a step and for everything computed from them.

    Attributes:
        tp_size: Number of tensor-parallel ranks.
        float32_logits: True if the output layer returns float32.
    """

    runner: ModelRunner
    tp_size: int = 1
    float32_logits: bool = True

    @property
    def bytes_per_logit(self) -> float:
        """Peak memory per logit of the row's whole vocabulary, on the rank with the most."""
        if self.runner == "cpu":
            return _BYTES_PER_LOGIT_V1
        logit = 4 if self.float32_logits else 2
        # `all_gather` holds the part of this rank, the parts of all ranks, and their joined copy.
        gathered = logit * (2 + 1 / self.tp_size) if self.tp_size > 1 else 0.0
        if self.runner == "cuda_v1":
            return max(_BYTES_PER_LOGIT_V1, gathered)
        # `torch.topk` copies logits of a padded vocabulary; a temperature other than 1 converts 16-bit logits.
        return max(8 if self.float32_logits else 6, gathered)

    def step_size(self, logits_mib: int, vocab_size: int, n_logprobs: int) -> StepSize:
        """Return the largest useful step whose logits and log-probabilities fit into ``logits_mib``.

        Args:
            logits_mib: Memory for logits and everything computed from them, in MiB.
            vocab_size: Rows of the output layer.
            n_logprobs: Log-probabilities per position.

        Raises:
            TeacherSetupError: The memory holds fewer than 8 rows.
        """
        if self.runner == "cuda_v2":
            return self._step_in_chunks(logits_mib, vocab_size, n_logprobs)
        # One row of logits per token, and one more per sequence for its next token.
        bytes_per_row = self.bytes_per_logit * vocab_size + n_logprobs * _BYTES_PER_LOGPROB_V1
        rows = int(logits_mib * MIB // bytes_per_row)
        _check_rows(rows, bytes_per_row, (logits_mib, vocab_size, n_logprobs))
        sequences = min(_MAX_SEQUENCES, rows // 4)
        tokens = min(rows - sequences, _MAX_TOKENS_CPU if self.runner == "cpu" else _MAX_TOKENS_CUDA)
        return StepSize(tokens, sequences, max(1, tokens // 4), tokens + sequences)

    def _step_in_chunks(self, logits_mib: int, vocab_size: int, n_logprobs: int) -> StepSize:
        """Return the step of V2, which holds the logits of a few rows and the log-probabilities of all tokens.

        Log-probabilities get at most half of the memory, logits the rest. The logits of the next tokens, one row per
        sequence, are freed before the first chunk.
        """
        budget = logits_mib * MIB
        bytes_per_token = (n_logprobs + 1) * _BYTES_PER_JOINED_LOGPROB_V2 + 8
        bytes_per_row = self.bytes_per_logit * vocab_size + n_logprobs * _BYTES_PER_LOGPROB_V2
        tokens = min(_MAX_TOKENS_CUDA, budget // 2 // bytes_per_token)
        rows = min(MAX_LOGIT_ROWS_V2, tokens, int((budget - tokens * bytes_per_token) // bytes_per_row))
        _check_rows(rows, 2 * max(bytes_per_row, bytes_per_token), (logits_mib, vocab_size, n_logprobs))
        sequences = min(_MAX_SEQUENCES, rows, max(1, tokens // 4))
        return StepSize(tokens, sequences, max(1, tokens // 4), rows)


def _check_rows(rows: int, bytes_per_row: float, request: tuple[int, int, int]) -> None:
    if rows < _MIN_ROWS:
        logits_mib, vocab_size, n_logprobs = request
        minimum = -int(-_MIN_ROWS * bytes_per_row // MIB)
        raise TeacherSetupError(
            f"LOGITS_MIB={logits_mib} holds {rows} rows of logits over a vocabulary of {vocab_size} with "
            f"N_LOGPROBS={n_logprobs}, a step needs at least {_MIN_ROWS}",
            options=("LOGITS_MIB",),
            remedy=f"set LOGITS_MIB={minimum} or more (1024 is usual)",
        )


@dataclass(frozen=True)
class ResultMemory:
    """Memory that results need until they are sent.

    Attributes:
        n_logprobs: Log-probabilities per position (K).
        id_bytes: Bytes of a token id, and of a rank, in vLLM's tensors: 8 in its V2 runner, else 4.
        max_bytes: Host memory for the results of all admitted sequences.
    """

    n_logprobs: int
    id_bytes: int
    max_bytes: int

    def _bytes_per_row(self, k: int) -> int:
        """Bytes of vLLM's row of a token: ids and log-probabilities of the top k and of the sampled token, its rank."""
        return (k + 1) * (4 + self.id_bytes) + self.id_bytes

    @staticmethod
    def _bytes_per_copied_row(k: int) -> int:
        """Bytes of our row: 4 for each id and log-probability of the top k, and for the sampled token's."""
        return 4 * (2 * k + 1)

    def bytes_of(self, sequence: TeacherSequence) -> int:
        """Return the maximum host memory of one result: vLLM's rows, and our copy of the response rows.

        Support ids have an id and a log-probability in vLLM's rows of the response, and a log-probability in the copy.
        vLLM's rows of V2 are in pinned memory, whose blocks torch rounds up to powers of two. This is not counted.
        """
        k = self.n_logprobs if sequence.with_top_k else 0
        support = sequence.n_support * (self.id_bytes + 4 + 4)
        n_rows = (
            len(sequence.token_ids) - 1 if self.id_bytes == 8 else sequence.n_scored
        )  # V1 has no rows of the prompt
        return n_rows * self._bytes_per_row(k) + sequence.n_scored * (self._bytes_per_copied_row(k) + support)

    def capacity_tokens(self, step: StepSize) -> int:
        """Return the tokens of two steps, or fewer if their results would exceed the memory."""
        row_bytes = self._bytes_per_row(self.n_logprobs) + self._bytes_per_copied_row(self.n_logprobs)
        return max(1, min(2 * step.tokens, self.max_bytes // row_bytes))

    def device_bytes(self, step: StepSize, max_model_len: int) -> int:
        """Return the maximum memory of unfinished results on the GPU (V2).

        The rows of a sequence are views of whole steps, so a step stays in memory until its last sequence is finished.
        The first sequence in order takes ``max_sequence_tokens`` of each step. One more sequence is joined.

        Args:
            step: Maximum size of an engine step.
            max_model_len: Longest sequence, in tokens.
        """
        n_steps = -(-max_model_len // step.max_sequence_tokens) + 1
        return (n_steps * step.tokens + max_model_len) * self._bytes_per_row(self.n_logprobs)


def describe_memory_shortage(free_bytes: int, needed_bytes: int, total_bytes: int, utilization: float) -> str | None:
    """Return a warning if a GPU lacks memory for logits and results, else None.

    vLLM does not reserve this memory: its own measurement at start-up scores no prompts.

    Args:
        free_bytes: Memory that torch can still use.
        needed_bytes: Memory for the logits of a step and for unfinished results.
        total_bytes: Memory of the GPU.
        utilization: ``GPU_MEMORY_UTILIZATION`` of this engine.
    """
    if free_bytes >= needed_bytes:
        return None
    lower = max(0.05, utilization - (needed_bytes - free_bytes) / total_bytes)
    return (
        f"the GPU has {free_bytes >> 20} MiB for logits and results, which need up to {needed_bytes >> 20} MiB; set "
        f"GPU_MEMORY_UTILIZATION={int(lower * 100) / 100:g} or less (or a smaller KV_CACHE_MIB, LOGITS_MIB, "
        "MAX_MODEL_LEN or N_LOGPROBS), or a step can run out of memory"
    )
