"""Rollout workers that die are replaced, a number of times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ray.exceptions import RayError

from recipe_gkd.errors import WorkerDied
from recipe_gkd.ray_cluster.node_probe import locate, run_on_node
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.process_id import ProcessId

log = logging.getLogger(__name__)
T = TypeVar("T")

NODE_PROBE_TIMEOUT_S = 2.0
"""What a node has to list or end processes; it takes a tenth of that."""


class RolloutRestarts:
    """Starts rollout workers anew when they die, ``trainer.max_worker_restarts`` times in a run."""

    def __init__(self, rollouts: WorkerGroup, start: Callable[[int], Any], *, allowed: int, timeout_s: float) -> None:
        """``start``: rank -> handle of a new worker in that rank's place."""
        self._rollouts, self._start, self._allowed, self._timeout_s = rollouts, start, allowed, timeout_s
        self._used = 0
        self._processes: dict[int, tuple[str, list[ProcessId]]] = {}
        """Of each rank: its node, and all processes that it had there once it was set up."""
        self._one_at_a_time = asyncio.Lock()

    async def replace_dead(self, death: WorkerDied | None = None) -> None:
        """Returns when every rank has a living worker that is set up. Raises ``death`` if no more may be replaced."""
        async with self._one_at_a_time:
            await self._replace_dead(death)

    async def record_processes(self, ranks: Iterable[int]) -> None:
        """Learn the processes of workers that are set up: once a worker has died, nobody knows its children."""
        ranks = list(ranks)
        places = await locate([self._rollouts.handles[rank] for rank in ranks])
        trees = await asyncio.gather(*(_response(run_on_node(at.node_id, process_trees.tree, [at.pid])) for at in places))
        for rank, place, tree in zip(ranks, places, trees, strict=True):
            self._processes[rank] = place.node_id, tree or []

    async def kill_orphans(self, ranks: Iterable[int]) -> None:
        """End what is left of dead workers: the ranks of a tensor-parallel engine can be stuck, and keep their GPUs.

        The process of a worker whose engine failed still lives, and ends here, too. Never raises, and takes
        :data:`NODE_PROBE_TIMEOUT_S` at most.
        """
        known = [self._processes.pop(rank) for rank in ranks if rank in self._processes]
        ends = (_response(run_on_node(node, process_trees.end_trees, tree, NODE_PROBE_TIMEOUT_S / 2)) for node, tree in known)
        if left := [pid for pids in await asyncio.gather(*ends) for pid in pids or ()]:
            log.warning("processes of dead rollout workers that could not be ended: %s", left)

    async def _replace_dead(self, death: WorkerDied | None) -> None:
        dead = await self._rollouts.dead()
        await self.kill_orphans(dead)
        why = f": {death}" if death is not None else ""
        for rank in dead:
            label = self._rollouts.label(rank)
            if self._used == self._allowed:
                raise WorkerDied(
                    f"{death or f'{label} died'}; it was not replaced: trainer.max_worker_restarts={self._allowed} "
                    f"{'are used up' if self._allowed else 'allows none'}"
                ) from death
            self._used += 1
            log.warning("%s died; starting another (%d of %d restarts)%s", label, self._used, self._allowed, why)
            self._rollouts.replace(rank, self._start(rank))
        await asyncio.gather(
            *(self._rollouts.call_one(rank, "setup", timeout_s=self._timeout_s, phase="start again") for rank in dead)
        )
        await self.record_processes(dead)


async def _response(of_node: Awaitable[T]) -> T | None:
    """None if the node is gone, or does not answer."""
    try:
        async with asyncio.timeout(NODE_PROBE_TIMEOUT_S):
            return await of_node
    except (RayError, OSError) as error:  # TimeoutError is an OSError, as is what this node itself raises
        log.warning("a node of the rollout pool could not be asked for its processes: %s", error or "no answer")
        return None
