"""Reuse of the memory of large arrays on the host.

The operating system clears each page of new memory when it is first written. For the teacher's arrays of a micro-batch,
tens of megabytes, this takes longer than writing the data.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

MIN_BYTES = 1 << 20
"""Smallest size of reused memory. The C library already reuses smaller blocks."""
MAX_FREE_BUFFERS = 8


class ArrayPool:
    """Allocator of arrays that reuses memory once nothing refers to it, neither an array nor a tensor made from it.

    Only one thread at a time may call :meth:`empty`. Arrays may be released by any thread.
    """

    def __init__(self) -> None:
        self._free: list[_Buffer] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialized array.

        Args:
            dtype: Data type.
        """
        dtype = np.dtype(dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes < MIN_BYTES:
            return np.empty(shape, dtype)
        buffer = self._take(n_bytes)
        lease = _Lease(buffer.bytes)
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        # The array and all views and tensors of it refer to the lease.
        return np.asarray(lease)[:n_bytes].view(dtype).reshape(shape)

    def _take(self, n_bytes: int) -> _Buffer:
        """Return the smallest free buffer that is large enough, or a new one."""
        free = sorted(self._free, key=lambda buffer: len(buffer.bytes))
        for buffer in free:
            if len(buffer.bytes) >= n_bytes:
                self._free.remove(buffer)
                return buffer
        for buffer in free[: max(0, len(free) - MAX_FREE_BUFFERS + 1)]:
            self._free.remove(buffer)
        # Unused pages cost nothing, and the next micro-batch may be a little larger.
        return _Buffer(n_bytes + n_bytes // 4)


class _Buffer:
    """Memory that is in use or free. Compared by identity."""

    def __init__(self, n_bytes: int) -> None:
        self.bytes = np.empty(n_bytes, np.uint8)


class _Lease:
    """Owner of the memory of one array, which numpy keeps alive as the base of the array and of its views."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__
