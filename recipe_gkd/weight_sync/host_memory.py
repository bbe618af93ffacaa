"""Host memory for buckets, which is slow to get: pages that were never touched cost five times the copy into them."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import numpy as np
import torch

_KEPT = 3
"""Buffers that lie idle at most: those of a staged update, which is as large as the model, are given back."""


def host_buffer(n_bytes: int) -> torch.Tensor:
    """uint8 [n_bytes]. numpy, unlike torch, asks the system for huge pages: 2.5 times as fast on first touch."""
    return torch.from_numpy(np.empty(n_bytes, dtype=np.uint8))


class BufferPool:
    """Lends buffers, and lends them again when nobody holds a tensor that shares their memory.

    On CUDA torch's own allocator does just that, so there it is asked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: deque[np.ndarray] = deque(maxlen=_KEPT)

    def lend(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes] of any content."""
        if self._device.type == "cuda":
            return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        memory_U = self._take(n_bytes)
        lent_U = memory_U[:n_bytes]
        # The tensor's storage holds `lent_U`, and it is dropped with the last tensor of that storage.
        weakref.finalize(lent_U, self._idle.append, memory_U).atexit = False
        return torch.from_numpy(lent_U)

    def _take(self, n_bytes: int) -> np.ndarray:
        small = []
        with contextlib.suppress(IndexError):  # tensors may be dropped, and buffers come back, in any thread
            while (memory_U := self._idle.popleft()).size < n_bytes:
                small.append(memory_U)
            self._idle.extend(small)
            return memory_U
        return np.empty(n_bytes, dtype=np.uint8)
