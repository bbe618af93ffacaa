"""Transports by name (``actor_rollout_ref.rollout.weight_transport``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.transport import Transport

TRANSPORTS: dict[str, type[Transport]] = {"collective": CollectiveTransport, "ipc": IpcTransport}


def open_transport(
    name: str,
    store: dist.TCPStore,
    *,
    rank: int,
    labels: Sequence[str],
    device: torch.device,
    timeout_s: float,
) -> Transport:
    """Open this rank of a new transport. All ranks must call it at the same time with the same ``name``.

    Args:
        name: Key of :data:`TRANSPORTS`.
        store: Rank 0's store, or a client of it.
        rank: This rank; rank 0 is the sender.
        labels: Names of all ranks in error messages.
        device: Device of the buckets.
        timeout_s: Deadline of each update.

    Raises:
        WeightSyncError: The name is unknown, or a rank reported a failure.
        DeadlineError: A rank did not connect in time.
    """
    if name not in TRANSPORTS:
        raise WeightSyncError(f"weight_transport is {name!r}, expected one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name](store, rank=rank, labels=labels, device=device, timeout_s=timeout_s)
