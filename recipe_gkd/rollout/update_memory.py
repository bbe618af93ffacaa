"""Memory that a weight update needs besides the model, and the memory that is free for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from recipe_gkd.config.keys import key_name
from recipe_gkd.errors import ResourceError
from recipe_gkd.runtime.cgroup_memory import limited_groups
from teacher.common.cuda_memory import free_cuda_memory
from teacher.common.sizes import GIB, MIB

_BUCKET_KEY = key_name(lambda config: config.actor_rollout_ref.rollout.update_weights_bucket_megabytes)
_BUCKETS_IN_MEMORY = 3
"""Consecutive buckets that can be in memory: one is received, one is loaded, one has the first weights of its layer."""


@dataclass(frozen=True, kw_only=True)
class UpdateMemory:
    """Memory that an update needs on one rank besides the model, in bytes.

    Attributes:
        model_bytes: Size of all buckets.
        window_bytes: Largest size of buckets that are in memory at a time if the update is loaded in place.
        layer_bytes: Size of the largest layer of the rank. vLLM allocates each layer once more while it loads it.
    """

    model_bytes: int
    window_bytes: int
    layer_bytes: int

    @property
    def in_place(self) -> int:
        """Memory for an update that is loaded as its buckets arrive."""
        return self.window_bytes + self.layer_bytes

    @property
    def double_buffered(self) -> int:
        """Free memory that permits keeping an update aside until it is complete: twice its size, as a margin."""
        return 2 * self.model_bytes

    def fits_double_buffered(self, free: int, n_sharing_host: int) -> bool:
        """Return True if all processes can keep an update aside.

        Args:
            free: Free memory of the device, in bytes.
            n_sharing_host: Processes that receive the same update into this memory.
        """
        return self.double_buffered * n_sharing_host <= free


def update_memory(bucket_bytes: Sequence[int], layer_bytes: int) -> UpdateMemory:
    """Return the memory for an update.

    Args:
        bucket_bytes: Sizes of the buckets, in the order of transfer.
        layer_bytes: Size of the largest layer of the rank.
    """
    windows = (sum(bucket_bytes[i : i + _BUCKETS_IN_MEMORY]) for i in range(len(bucket_bytes)))
    return UpdateMemory(model_bytes=sum(bucket_bytes), window_bytes=max(windows, default=0), layer_bytes=layer_bytes)


def largest_layer_bytes(model: torch.nn.Module) -> int:
    """Return the size of the largest module of a model, counting its own parameters only."""
    return max(sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules())


def free_memory(device: torch.device) -> int:
    """Return the memory that this process can still allocate on a device, in bytes.

    On CUDA it includes the blocks that torch keeps for reuse, which the driver counts as used. On a CPU the limits of
    a container count too.
    """
    if device.type == "cuda":
        return free_cuda_memory(device)
    return min([psutil.virtual_memory().available, *(group.free for group in limited_groups())])


def memory_shortage(
    needed: UpdateMemory, free: int, *, bucket_bytes: int, n_sharing_host: int, cache_key: str, cache_value: float
) -> ResourceError | None:
    """Return an error if an update cannot fit, whichever way it is received; None if it may fit.

    Args:
        free: Free memory of the device.
        bucket_bytes: Maximum size of a bucket.
        n_sharing_host: Processes that receive the same update into this memory.
        cache_key: Full name of the key that determines the size of the KV cache.
    """
    if needed.in_place * n_sharing_host <= free:
        return None
    each = f" for each of {n_sharing_host} processes" if n_sharing_host > 1 else ""
    return ResourceError(
        f"a weight update does not fit into the memory: it needs {needed.in_place / GIB:.2f} GiB{each} "
        f"({needed.window_bytes / GIB:.2f} for buckets, {needed.layer_bytes / GIB:.2f} for the largest layer; "
        f"{needed.double_buffered / GIB:.2f} if it were kept aside), and {free / GIB:.2f} GiB are free",
        remedy=f"lower {_BUCKET_KEY} (now {bucket_bytes / MIB:g}) or {cache_key} (now {cache_value})",
        keys=(_BUCKET_KEY, cache_key),
    )
