"""Which transport there is under which name (``actor_rollout_ref.rollout.weight_transport``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.transport import Transport

TRANSPORTS: dict[str, type[Transport]] = {"collective": CollectiveTransport, "ipc": IpcTransport}


def connect(
    transport: str,
    store: dist.TCPStore,
    *,
    rank: int,
    labels: Sequence[str],
    device: torch.device,
    timeout_s: float,
) -> Transport:
    """This end of a new transport; see :class:`Transport`."""
    if transport not in TRANSPORTS:
        raise WeightSyncError(f"weight_transport is {transport!r}; expected one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[transport](store, rank=rank, labels=labels, device=device, timeout_s=timeout_s)
