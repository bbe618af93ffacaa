"""Reuse of the memory of large arrays, only after their last reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recipe_gkd.actor.batch.host_arrays import MAX_FREE_BUFFERS, MIN_BYTES, ArrayPool

ROWS = MIN_BYTES // 32


class TestArrayPool:
    def test_empty_after_release_reuses_the_memory(self) -> None:
        pool = ArrayPool()
        array = pool.empty((ROWS, 16), np.float32)
        assert array.shape == (ROWS, 16) and array.dtype == np.float32 and array.flags.writeable
        address = array.ctypes.data
        array[:] = 7
        del array
        smaller = pool.empty((ROWS, 15), np.int32)
        assert smaller.ctypes.data == address

    def test_empty_while_a_view_or_tensor_lives_uses_other_memory(self) -> None:
        pool = ArrayPool()
        array = pool.empty((ROWS, 16), np.float32)
        array[:] = 7
        address = array.ctypes.data
        alive: list[Any] = [array[3:5].T, torch.from_numpy(array)[1:].flatten()]
        del array
        while alive:
            other = pool.empty((ROWS, 16), np.float32)
            other[:] = 0
            assert other.ctypes.data != address and float(alive.pop().max()) == 7.0
            del other
        assert address in [buffer.bytes.ctypes.data for buffer in pool._free] and len(pool._free) == 2

    def test_empty_of_small_array_has_memory_of_its_own(self) -> None:
        array = ArrayPool().empty((3, 0), np.int64)
        assert array.shape == (3, 0) and array.dtype == np.int64

    def test_empty_of_growing_sizes_keeps_few_buffers(self) -> None:
        pool = ArrayPool()
        arrays = [pool.empty((ROWS * 2 * size,), np.float32) for size in range(8, 30)]
        del arrays
        pool.empty((ROWS * 2 * 100,), np.float32)
        assert len(pool._free) <= MAX_FREE_BUFFERS
