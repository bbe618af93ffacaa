"""Ray's object stores: their use, and whether the actor pool's stores can hold the teachers' rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import grpc
import ray
from ray._private.internal_api import get_memory_info_reply
from ray._private.state import state as ray_state

from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.threads import in_thread
from teacher.common.sizes import GIB

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Shortest time between two measurements. One takes 6 ms per node."""
TIMEOUT_S = 2.0


class ObjectStoreUsage:
    """Metrics of the object stores of all nodes together, measured from time to time."""

    def __init__(self) -> None:
        self._measured_at = -EVERY_S
        self._metrics: dict[str, float] = {}

    async def metrics(self) -> dict[str, float]:
        """Return the metrics of the last measurement, which is repeated if it is old.

        ``perf/object_store_gb`` is the memory in use. ``perf/object_store_spilled_gb`` is what Ray has written to disk
        since its start, because the memory was full.
        """
        if now() - self._measured_at >= EVERY_S:
            self._measured_at = now()
            try:
                async with asyncio.timeout(TIMEOUT_S + 1):
                    reply = await in_thread(lambda: get_memory_info_reply(ray_state, timeout_seconds=TIMEOUT_S))
            except (grpc.RpcError, TimeoutError, AssertionError) as error:
                log.debug("the use of the object stores is unknown: %s", error)
            else:
                stats = reply.store_stats
                self._metrics = {
                    "perf/object_store_gb": stats.object_store_bytes_used / GIB,
                    "perf/object_store_spilled_gb": stats.spilled_bytes_total / GIB,
                }
        return dict(self._metrics)


def store_bytes(nodes: Mapping[str, str]) -> dict[str, float]:
    """Return the size of the object store of each node in bytes, by Ray's id of the node."""
    return {
        node["NodeID"]: float(node["Resources"].get("object_store_memory", 0))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in nodes
    }


def warn_if_small(
    nodes: Mapping[str, str], free_bytes: Mapping[str, int], batch_bytes: float, capacity_bytes: float
) -> None:
    """Log a warning if the object stores cannot hold the teachers' rows in memory.

    Args:
        nodes: Nodes of the actor pool: Ray's id -> address.
        free_bytes: Free shared memory of each node, by id.
        batch_bytes: Rows of the largest possible batch, over all nodes.
        capacity_bytes: Rows over all nodes with which the object store of one node is full.
    """
    sizes = store_bytes(nodes)
    for node, size in sizes.items():
        if size > free_bytes.get(node, 0):
            log.warning(
                "node %s: Ray's object store may use %.1f GB, but /dev/shm has %.1f GB free; a full /dev/shm ends "
                "processes with a bus error. Enlarge it (docker run --shm-size), or start Ray with a smaller "
                "--object-store-memory",
                nodes[node], size / GIB, free_bytes.get(node, 0) / GIB,
            )  # fmt: skip
    if batch_bytes > capacity_bytes:
        log.warning(
            "a batch of the longest responses has %.1f GB of teacher rows, and the object stores of the nodes that "
            "read them hold %.1f GB; Ray then writes rows to disk (perf/object_store_spilled_gb). Start Ray with a "
            "larger --object-store-memory, or request fewer rows per position: actor_rollout_ref.teacher.top_k",
            batch_bytes / GIB, capacity_bytes / GIB,
        )  # fmt: skip
