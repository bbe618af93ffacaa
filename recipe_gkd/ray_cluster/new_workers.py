"""Workers that take the place of lost ones: Ray must find room for them before they can be set up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.ray_cluster.worker_group import WorkerGroup

T = TypeVar("T")

PLACEMENT_TIMEOUT_S = 120.0
"""Time that Ray has to start the process of a new worker, whose node may be lost."""
_POLL_S = 1.0


async def set_up_in_new_processes(group: WorkerGroup[object], ranks: Sequence[int], set_up: Awaitable[T]) -> T:
    """Return the result of the set-up of new workers. It has its own deadline, which is much longer than Ray's.

    Args:
        set_up: Set-up of these workers.

    Raises:
        ResourceError: Ray has not started a worker within :data:`PLACEMENT_TIMEOUT_S`, because no node has room.
        GkdError: The set-up failed.
    """
    call = asyncio.ensure_future(set_up)
    try:
        started = time.monotonic()
        while not call.done():
            locations = await locate([group.handles[rank] for rank in ranks])
            waiting = [group.label(rank) for rank, at in zip(ranks, locations, strict=True) if not at.pid]
            if not waiting:
                break
            if time.monotonic() - started > PLACEMENT_TIMEOUT_S:
                raise ResourceError(
                    f"not started again within {PLACEMENT_TIMEOUT_S:g} s: {', '.join(waiting)}. Ray has no room, "
                    "because a node may be lost",
                    workers=tuple(waiting),
                    remedy="add a node with as many slots, and start the run again",
                )
            await asyncio.wait([call], timeout=_POLL_S)
        return await call
    finally:
        call.cancel()
