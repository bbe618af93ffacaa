"""Sizes of engine steps and results, for each of vLLM's model runners."""

from __future__ import annotations

import numpy as np
import pytest

from teacher.engines.sizes import (
    MAX_LOGIT_ROWS_V2,
    ModelRunner,
    ResultMemory,
    StepMemory,
    StepSize,
    describe_memory_shortage,
)
from teacher.errors import TeacherSetupError
from teacher.records import TeacherSequence
from tests._support.errors import raises

QWEN_VOCABULARY = 152_064
V1_RUNNERS: list[tuple[ModelRunner, int]] = [("cpu", 10), ("cuda_v1", 10)]


class TestStepMemory:
    @pytest.mark.parametrize(("runner", "bytes_per_logit"), V1_RUNNERS)
    @pytest.mark.parametrize(("logits_mib", "vocab_size"), [(1, 96), (1024, 512), (1024, 152_064), (128, 256_000)])
    def test_step_size_rows_of_v1_fit_into_memory(
        self, runner: ModelRunner, bytes_per_logit: int, logits_mib: int, vocab_size: int
    ) -> None:
        for n_logprobs in (1, vocab_size // 2):
            step = StepMemory(runner).step_size(logits_mib, vocab_size, n_logprobs)
            bytes_per_row = vocab_size * bytes_per_logit + n_logprobs * 56
            assert (step.tokens + step.sequences) * bytes_per_row <= logits_mib * 2**20
            assert step.logit_rows == step.tokens + step.sequences
            assert 1 <= step.sequences <= step.tokens and 1 <= step.max_sequence_tokens <= step.tokens

    @pytest.mark.parametrize(
        ("tp_size", "float32_logits", "bytes_per_logit"), [(1, True, 8), (1, False, 6), (2, True, 10), (8, True, 8.5)]
    )
    @pytest.mark.parametrize(("logits_mib", "vocab_size"), [(1, 96), (1024, 512), (1024, 152_064), (128, 256_000)])
    def test_step_size_chunk_and_results_of_v2_fit_into_memory(
        self, tp_size: int, float32_logits: bool, bytes_per_logit: float, logits_mib: int, vocab_size: int
    ) -> None:
        memory = StepMemory("cuda_v2", tp_size, float32_logits)
        assert memory.bytes_per_logit == bytes_per_logit
        for n_logprobs in (1, vocab_size // 2):
            step = memory.step_size(logits_mib, vocab_size, n_logprobs)
            used = step.logit_rows * vocab_size * bytes_per_logit + step.tokens * (n_logprobs + 1) * 24
            assert used <= logits_mib * 2**20
            assert 8 <= step.logit_rows <= min(step.tokens, MAX_LOGIT_ROWS_V2)
            assert 1 <= step.sequences <= step.logit_rows, "the logits of the next tokens would need more memory"
            assert 1 <= step.max_sequence_tokens <= step.tokens

    @pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
    def test_step_size_of_v2_with_default_memory_is_8192_tokens(self, tp_size: int) -> None:
        step = StepMemory("cuda_v2", tp_size).step_size(1024, QWEN_VOCABULARY, 256)
        assert (step.tokens, step.sequences, step.max_sequence_tokens) == (8192, 256, 2048)
        assert step.logit_rows > 600

    @pytest.mark.parametrize(("runner", "minimum"), [("cpu", 12), ("cuda_v1", 12), ("cuda_v2", 19)])
    def test_step_size_too_little_memory_raises_with_minimum(self, runner: ModelRunner, minimum: int) -> None:
        memory = StepMemory(runner)
        for too_little in (1, minimum - 1):
            with raises(TeacherSetupError, options=("LOGITS_MIB",)):
                memory.step_size(too_little, QWEN_VOCABULARY, 256)
        memory.step_size(minimum, QWEN_VOCABULARY, 256)


def sequence(n_tokens: int, prompt_len: int) -> TeacherSequence:
    return TeacherSequence(np.zeros(n_tokens, np.int32), prompt_len)


class TestResultMemory:
    @pytest.mark.parametrize(
        ("id_bytes", "expected"), [(4, 60 * (3 * 8 + 4) + 60 * 20), (8, 99 * (3 * 12 + 8) + 60 * 20)]
    )
    def test_bytes_of_counts_rows_and_ids_of_the_model_runner(self, id_bytes: int, expected: int) -> None:
        memory, plain = ResultMemory(2, id_bytes, 2**20), sequence(100, prompt_len=40)
        assert memory.bytes_of(plain) == expected
        ids_TJ = np.zeros((60, 5), np.int32)
        both, alone = (
            TeacherSequence(plain.token_ids, 40, support_ids_TJ=ids_TJ, with_top_k=flag) for flag in (True, False)
        )
        assert memory.bytes_of(both) == expected + 60 * 5 * (id_bytes + 8)
        without_top_k = ResultMemory(0, id_bytes, 2**20).bytes_of(plain)
        assert memory.bytes_of(alone) == without_top_k + 60 * 5 * (id_bytes + 8)

    @pytest.mark.parametrize("id_bytes", [4, 8])
    def test_capacity_tokens_is_two_steps_if_results_fit(self, id_bytes: int) -> None:
        step = StepSize(tokens=2048, sequences=256, max_sequence_tokens=512, logit_rows=2304)
        assert ResultMemory(256, id_bytes, 2**31).capacity_tokens(step) == 2 * step.tokens
        for n_logprobs in (1, 256, 150_000):
            memory = ResultMemory(n_logprobs, id_bytes, 2**24)
            n_tokens = memory.capacity_tokens(step)
            assert n_tokens == 1 or memory.bytes_of(sequence(n_tokens, prompt_len=1)) <= 2**24

    def test_device_bytes_cover_the_steps_of_the_longest_sequence(self) -> None:
        step, memory = StepSize(8192, 256, 2048, 840), ResultMemory(256, 8, 2**31)
        bytes_per_row = 257 * 12 + 8
        assert memory.device_bytes(step, 32_768) == (17 * 8192 + 32_768) * bytes_per_row
        assert memory.device_bytes(step, 131_072) < 2**31


class TestDescribeMemoryShortage:
    def test_describe_memory_shortage_names_a_utilization_that_fits(self) -> None:
        gib = 2**30
        assert describe_memory_shortage(3 * gib, 3 * gib, 24 * gib, 0.85) is None
        warning = describe_memory_shortage(2 * gib, 3 * gib, 24 * gib, 0.85)
        assert warning is not None and "has 2048 MiB" in warning and "need up to 3072 MiB" in warning
        assert "GPU_MEMORY_UTILIZATION=0.8 or less" in warning
