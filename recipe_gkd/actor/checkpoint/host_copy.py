"""Copies of tensors outside of their device: pinned host memory for a GPU, a file for a CPU."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from recipe_gkd.runtime.scratch import scratch_folder

PINNED_BLOCK_BYTES = 256 << 20
"""Size of a block of pinned memory. torch rounds each allocation up to a power of two, so few large blocks of other
sizes would need up to twice the memory."""
Storages = Sequence[tuple[UntypedStorage, int]]
"""Storages with their sizes in bytes."""


class HostCopy(Protocol):
    """A copy of storages, one after the other.

    Attributes:
        place: Description for messages.
    """

    place: str

    def write(self, storages: Storages) -> None:
        """Replace the copy.

        Raises:
            OSError, RuntimeError, MemoryError: There is no space for it. The storages are unchanged.
        """

    def read(self, storages: Storages) -> None:
        """Fill storages of the same sizes as in the last :meth:`write`.

        On a GPU the call returns before the copy is complete, and later kernels of the current stream run after it.
        """

    def close(self) -> None:
        """Free the copy."""


def host_copy(device: torch.device) -> HostCopy:
    """Return an empty copy for the storages of a device.

    Args:
        device: Device of the storages. For a CPU the copy is a file in the temporary folder of this process.
    """
    return PinnedCopy(device) if device.type == "cuda" else FileCopy()


class PinnedCopy:
    """A copy in pinned host memory, which is allocated once."""

    place = "pinned host memory"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.blocks: list[Tensor] = []
        """Blocks of pinned memory, uint8."""

    def write(self, storages: Storages) -> None:
        """Replace the copy, and wait until it is complete."""
        self._allocate(sum(n_bytes for _, n_bytes in storages))
        for part, block in self._parts(storages):
            block.copy_(part, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    def read(self, storages: Storages) -> None:
        """Fill storages without waiting: the host can prepare the first micro-batch meanwhile."""
        for part, block in self._parts(storages):
            part.copy_(block, non_blocking=True)

    def close(self) -> None:
        """Free the memory."""
        torch.cuda.current_stream(self._device).synchronize()
        self.blocks = []

    def _allocate(self, n_bytes: int) -> None:
        sizes = [PINNED_BLOCK_BYTES] * (n_bytes // PINNED_BLOCK_BYTES)
        if rest := n_bytes % PINNED_BLOCK_BYTES:
            sizes.append(rest)
        if [len(block) for block in self.blocks] != sizes:
            self.blocks = []
            self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]

    def _parts(self, storages: Storages) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of a storage with its part of a block."""
        index, used = 0, 0
        for storage, n_bytes in storages:
            source, start = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), 0
            while start < n_bytes:
                block = self.blocks[index]
                size = min(n_bytes - start, len(block) - used)
                yield source[start : start + size], block[used : used + size]
                start, used = start + size, used + size
                if used == len(block):
                    index, used = index + 1, 0


class FileCopy:
    """A copy in an unnamed file of the temporary folder, whose space is free again when this process ends."""

    def __init__(self) -> None:
        self.place = f"a file in {scratch_folder()}"
        self._file = tempfile.TemporaryFile(dir=scratch_folder())  # noqa: SIM115  # closed by `close`

    def write(self, storages: Storages) -> None:
        """Replace the copy."""
        offset = 0
        for memory in _memories(storages):
            start = 0
            while start < len(memory):
                start += os.pwrite(self._file.fileno(), memory[start:], offset + start)
            offset += len(memory)
        self._file.truncate(offset)

    def read(self, storages: Storages) -> None:
        """Fill storages."""
        offset = 0
        for memory in _memories(storages):
            start = 0
            while start < len(memory):
                n_read = os.preadv(self._file.fileno(), [memory[start:]], offset + start)
                if not n_read:
                    raise OSError(f"{self.place} ends after {offset + start} bytes; it was truncated")
                start += n_read
            offset += len(memory)

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()


def _memories(storages: Storages) -> Iterator[memoryview]:
    """Yield the memory of each storage. NumPy is not used, because torch then refuses to resize the storage."""
    for storage, n_bytes in storages:
        yield memoryview((ctypes.c_char * n_bytes).from_address(storage.data_ptr())).cast("B")
