"""Mappings of host memory that several processes share, pinned if a GPU copies from or to them.

Without pinning, the driver copies through its own small buffer, several times slower than the bus.
"""

from __future__ import annotations

import logging
import mmap

import torch

log = logging.getLogger(__name__)

_PORTABLE = 1
"""``cudaHostRegisterPortable``: the memory is pinned for all contexts of the process."""


class SharedMapping(mmap.mmap):
    """Mapping of a file descriptor, which may be closed afterwards. It lives as long as a tensor in it."""

    _pinned_at = 0

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the memory, uint8 [size]. Called once.

        Args:
            device: Device whose copies use the memory. For a GPU the memory is pinned, if the driver can do that.
        """
        memory_U = torch.frombuffer(self, dtype=torch.uint8)
        if device.type == "cuda":
            self._pin(memory_U.data_ptr())
        return memory_U

    def _pin(self, address: int) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(address, len(self), _PORTABLE))
        if status:
            log.warning(
                "%d MiB of shared memory cannot be pinned (CUDA error %d); weight syncs are slower",
                len(self) >> 20,
                status,
            )
        else:
            self._pinned_at = address

    def __del__(self) -> None:
        if self._pinned_at:  # before the memory is unmapped
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)
