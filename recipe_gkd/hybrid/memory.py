"""Peak memory of each phase, measured by the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config
from recipe_gkd.config.timeouts import SYNC_TIMEOUT, timeout_of
from recipe_gkd.errors import WorkerDied
from recipe_gkd.hybrid.turns import DevicePhase
from recipe_gkd.rollout.ray_worker import RolloutWorker
from teacher.common.sizes import GIB

log = logging.getLogger(__name__)

_MEASURED = ("generate", "update", "sync")
_CALL = "measure the memory"


class PhasePeaks:
    """Peak memory of actor and rollout engine together in each phase.

    Args:
        cluster: Connected workers.

    Attributes:
        metrics: ``perf/memory_gb/<phase>``, in GiB.
    """

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._cluster, self._timeout_s = cluster, timeout_of(config, SYNC_TIMEOUT)
        self._tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self.metrics: dict[str, float] = {}

    async def record(self, phase: DevicePhase | None) -> None:
        """Record the peak of a phase, and start to measure the next one."""
        try:
            if phase in _MEASURED:
                actors, rollouts = await asyncio.gather(
                    self._cluster.actors.call(ActorWorker.peak_memory, timeout_s=self._timeout_s, phase=_CALL),
                    self._cluster.rollouts.call(RolloutWorker.peak_memory, timeout_s=self._timeout_s, phase=_CALL),
                )
                self.metrics[f"perf/memory_gb/{phase}"] = self._largest_slot(actors, rollouts) / GIB
            await asyncio.gather(
                self._cluster.actors.call(ActorWorker.reset_peak_memory, timeout_s=self._timeout_s, phase=_CALL),
                self._cluster.rollouts.call(RolloutWorker.reset_peak_memory, timeout_s=self._timeout_s, phase=_CALL),
            )
        except WorkerDied as death:  # the next call that needs the worker replaces it, or ends the run
            log.warning("the memory of the phase %s was not measured: %s", phase, death)

    def _largest_slot(self, actors: Sequence[int], rollouts: Sequence[int]) -> float:
        """Return the memory in use on the slot with the most, in bytes.

        Processes on one GPU report the memory of the GPU. Processes on a CPU report their own.
        """
        on_cpu = "cpu" in self._cluster.actor_devices
        slots = []
        for engine, own in enumerate(rollouts):
            ranks = actors[engine * self._tp : (engine + 1) * self._tp]
            slots.append((sum(ranks) + own) / self._tp if on_cpu else max(*ranks, own))
        return max(slots)
