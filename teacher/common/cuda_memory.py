"""Free memory of a GPU. Imports torch on use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_DEFAULT_POOL = (0, 0)


def free_cuda_memory(device: Any = None) -> int:
    """Return the memory of a GPU that this process can still allocate, in bytes.

    Args:
        device: Device or its number; None for the current one.
    """
    import torch

    index = torch.cuda.current_device() if device is None else torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    free = int(torch.cuda.mem_get_info(index)[0])
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # the allocator backend:cudaMallocAsync has no segments
        return free
    return free + reusable_bytes(segment for segment in segments if segment["device"] == index)


def reusable_bytes(segments: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes of torch's segments that new tensors can use.

    Free blocks in private pools do not count: only the CUDA graphs, or the sleeping engine, of a pool use them again.

    Args:
        segments: Result of ``torch.cuda.memory_snapshot``.
    """
    return sum(
        segment["total_size"] - segment["active_size"]
        for segment in segments
        if tuple(segment.get("segment_pool_id", _DEFAULT_POOL)) == _DEFAULT_POOL
    )
