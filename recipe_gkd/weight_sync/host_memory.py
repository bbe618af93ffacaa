"""Host memory for buckets. It is reused, because the first access to a new page takes five times as long as a copy."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import numpy as np
import torch

_MAX_IDLE_BUFFERS = 3
"""Buffers that the pool keeps. The buffers of a double-buffered update, as large as the model, are freed."""


def allocate_host_buffer(n_bytes: int) -> torch.Tensor:
    """Return a new host buffer, uint8 [n_bytes].

    numpy requests huge pages from the operating system and torch does not; with them the first access is 2.5 times as
    fast.
    """
    return torch.from_numpy(np.empty(n_bytes, dtype=np.uint8))


class BufferPool:
    """Pool of buffers that are reused after the last tensor that shares their memory is gone.

    On CUDA torch's caching allocator already does this, so the pool passes requests on to it.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: deque[np.ndarray] = deque(maxlen=_MAX_IDLE_BUFFERS)

    def lend(self, n_bytes: int) -> torch.Tensor:
        """Return a buffer with arbitrary contents, uint8 [n_bytes]."""
        if self._device.type == "cuda":
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        memory_U = self._take(n_bytes)
        lent_U = memory_U[:n_bytes]
        # The tensor's storage refers to `lent_U`, which is released together with the storage's last tensor.
        weakref.finalize(lent_U, self._idle.append, memory_U).atexit = False
        return torch.from_numpy(lent_U)

    def _take(self, n_bytes: int) -> np.ndarray:
        small = []
        with contextlib.suppress(IndexError):  # tensors may be released, and buffers returned, in any thread
            while (memory_U := self._idle.popleft()).size < n_bytes:
                small.append(memory_U)
            self._idle.extend(small)
            return memory_U
        return np.empty(n_bytes, dtype=np.uint8)
