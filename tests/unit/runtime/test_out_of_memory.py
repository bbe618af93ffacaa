"""Out-of-memory errors, and the message about them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from recipe_gkd.config.key_types import known_keys
from recipe_gkd.errors import DataError, WorkerError
from recipe_gkd.runtime.out_of_memory import ADVICE, out_of_memory_explained
from teacher.common.out_of_memory import is_out_of_memory, memory_details, memory_in_use, reason_of
from tests._support.errors import raises

CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
)


class TestIsOutOfMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            torch.AcceleratorError("CUDA error: out of memory"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            torch.distributed.DistBackendError("NCCL error\nLast error:\nCuda failure 2 'out of memory'"),
            torch.distributed.DistBackendError("NCCL error\nLast error:\nCuda failure 'out of memory'"),
            RuntimeError(CPU_TEXT),
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
            RuntimeError("std::bad_alloc"),
            RuntimeError("Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB'"),
            RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"),
            ValueError("Free memory on device is less than desired GPU memory utilization (0.9, 70 GiB)"),
            MemoryError(),
        ],
        ids=str,
    )
    def test_error_of_an_allocator_is_found_also_as_a_cause(self, error: Exception) -> None:
        assert is_out_of_memory(error)
        outer = ValueError("the layer failed")
        outer.__cause__ = error
        assert is_out_of_memory(outer)

    @pytest.mark.parametrize(
        "error",
        [
            None,
            RuntimeError("out of memory, says the user's code"),
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            WorkerError("actor worker 1 failed: CUDA out of memory"),
            ValueError("std::bad_alloc"),
        ],
        ids=str,
    )
    def test_other_error_is_none(self, error: Exception | None) -> None:
        assert not is_out_of_memory(error)

    def test_allocation_of_torch_that_is_too_large_is_found(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 60, dtype=torch.uint8)
        assert is_out_of_memory(caught.value)

    def test_cycle_of_causes_ends(self) -> None:
        one, other = ValueError("one"), ValueError("other")
        one.__cause__, other.__cause__ = other, one
        assert not is_out_of_memory(one)


class TestMessage:
    def test_reason_is_the_first_line_of_the_cause(self) -> None:
        error = ValueError("the layer failed")
        error.__cause__ = RuntimeError(CPU_TEXT + "\nException raised from frame 1")
        assert reason_of(error) == f"RuntimeError: {CPU_TEXT}"

    def test_details_have_memory_and_sizes_in_descending_order(self) -> None:
        memory, sizes = memory_details({"small": 1 << 20, "large": 3 << 30})
        assert memory.startswith("memory: ") and "resident memory of this process" in memory
        assert sizes == "sizes: large 3.00 GiB, small 1.0 MiB"

    def test_memory_in_use_of_this_process_is_plausible(self) -> None:
        [resident] = [line for line in memory_in_use() if line.startswith("resident")]
        assert float(resident.split()[-2]) > 1

    def test_every_pool_and_phase_has_keys(self) -> None:
        for found in ADVICE.values():
            assert found.keys and len(set(found.keys)) == len(found.keys)
            for key in found.keys:
                assert key.rpartition(".")[2] in found.text or key == "trainer.n_gpus_per_node"

    def test_keys_exist(self) -> None:
        known = known_keys()
        assert {key for found in ADVICE.values() for key in found.keys} <= known.keys()


class TestExplained:
    def test_out_of_memory_error_is_converted_and_frees_tensors(self) -> None:
        tensors: list[weakref.ref[torch.Tensor]] = []

        def allocate() -> None:
            activation = torch.zeros(3)
            tensors.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory")

        with (
            raises(WorkerError, phase="save", worker="actor rank 3", keys=ADVICE["actor", "save"].keys) as caught,
            out_of_memory_explained(
                pool="actor", phase="save", label="actor rank 3", sizes=lambda: {"parameters": 1 << 30}
            ),
        ):
            allocate()
        assert caught.value.details[1] == "sizes: parameters 1.00 GiB"
        gc.collect()
        assert tensors[0]() is None

    @pytest.mark.parametrize("error", [DataError("bad row"), ValueError("not this")])
    def test_other_error_is_unchanged(self, error: Exception) -> None:
        with (
            pytest.raises(type(error)) as caught,
            out_of_memory_explained(pool="actor", phase="save", label="actor rank 3"),
        ):
            raise error
        assert caught.value is error
