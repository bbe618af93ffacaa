"""Devices of a run, and the state machine of devices that actor, rollout engines and teacher share.

======== ========================== ============================== ====================================================
Phase    Work                       On the devices                 To enter it
======== ========================== ============================== ====================================================
sync     transfer of the weights    weights of actor and engines   teacher sleeps; engines release everything, then
                                                                   allocate their weights
generate responses, validation      engines with their KV cache    teacher sleeps; engines allocate their KV cache, and
                                                                   must give the actor's log-probabilities
score    teacher's log-             teacher                        engines sleep; teacher wakes and verifies itself
         probabilities
update   update, checkpoint         states of the actor            engines sleep; teacher sleeps; weights and gradients
                                                                   of the actor return
======== ========================== ============================== ====================================================

A step is ``sync``, ``generate``, ``score``, ``update``. The phase ``score`` exists only with
``teacher.sleep_between_batches``; otherwise the teacher has its own devices. Engines sleep with ``hybrid_engine``
and a ``rollout.sleep_level`` above 0. States of the ``*_offload`` keys leave the device at the end of each call of the
actor that needs them (:mod:`recipe_gkd.actor.offload`). The phase ``update`` is entered as soon as all responses are
complete, so that the transition overlaps with a teacher on other devices.

If responses are needed without an update in between (after a checkpoint that follows a validation), the same version is
sent again, because engines that sleep at level 2 have no weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Protocol

import numpy as np

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, timeout_of
from recipe_gkd.hybrid.engines import Engines
from recipe_gkd.hybrid.memory import PhasePeaks
from recipe_gkd.hybrid.sync_probe import SyncProbe, needs_probe, probe_contexts
from recipe_gkd.hybrid.turns import DevicePhase, Turns
from recipe_gkd.hybrid.verification import request_ids
from recipe_gkd.metrics.steps import span
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.weight_sync.model_check import SYNC_METRIC, MismatchGuard


class Devices(Protocol):
    """Devices of a run."""

    def turn(self, phase: DevicePhase) -> AbstractAsyncContextManager[None]:
        """Return a context in which the devices have the models of a phase in their memory.

        Args:
            phase: DevicePhase to use.

        Raises:
            WorkerError, DeadlineError, WeightSyncError, TeacherError: On entry, if the devices could not be prepared.
                The next turn tries again.
        """

    async def sync(self, version: int) -> dict[str, float]:
        """Send the actor's weights to all rollout workers as ``version``, and return metrics.

        Raises:
            WeightSyncError: The weights could not be transferred, or the engines have computed another model than the
                actor in several steps.
        """

    def prepare_update(self) -> None:
        """Request the phase ``update`` in the background, and return at once.

        Called when a replica has completed its responses. It takes effect once no replica generates.
        """

    async def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. Called after an update, in its turn."""

    async def close(self) -> None:
        """Cancel a preparation. Call it before the workers end."""


def open_devices(
    config: Config, cluster: Cluster, teachers: Teachers, prompts: Sequence[np.ndarray], guard: MismatchGuard
) -> Devices:
    """Return the devices of a run.

    Args:
        cluster: Connected workers.
        teachers: Clients of the teachers.
        prompts: Token ids of the prompts of the data set, int32 [P] each, with which engines are verified.
        guard: Receives the differences between engines and actor after a weight sync.
    """
    settings = config.actor_rollout_ref
    if settings.hybrid_engine or settings.teacher.sleep_between_batches:
        return SharedDevices(config, cluster, teachers, request_ids(prompts[0].tolist()))
    contexts = probe_contexts(prompts, config) if guard.is_enabled and needs_probe(config) else []
    return SeparateDevices(cluster, guard, SyncProbe(config, cluster, contexts) if contexts else None)


class SeparateDevices:
    """Devices that no two stages share.

    Args:
        cluster: Connected workers.
        guard: Receives the differences that the probe measures.
        probe: Comparison of the engines with the actor after each weight sync. None: there is none.
    """

    def __init__(self, cluster: Cluster, guard: MismatchGuard, probe: SyncProbe | None = None) -> None:
        self._cluster, self._guard, self._probe = cluster, guard, probe

    def turn(self, phase: DevicePhase) -> AbstractAsyncContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    async def sync(self, version: int) -> dict[str, float]:
        """Send the actor's weights to all rollout workers as ``version``, compare the engines, and return metrics."""
        metrics = await self._cluster.weights.sync(version)
        if self._probe is None:
            return metrics
        with span(metrics, "timing/sync_probe"):
            differences = await self._probe.measure(version)
        self._guard.observe(version, differences)
        return metrics | ({SYNC_METRIC: max(differences.values())} if differences else {})

    def prepare_update(self) -> None:
        """Do nothing."""

    async def take_metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    async def close(self) -> None:
        """Do nothing."""


class SharedDevices:
    """Devices that stages use in turn; the module has the phases.

    Args:
        cluster: Connected workers. Engines that can sleep do so.
        teachers: Clients of the teachers. With ``teacher.sleep_between_batches`` they sleep.
        ids: Token ids of the fixed request with which engines are verified.
    """

    def __init__(self, config: Config, cluster: Cluster, teachers: Teachers, ids: Sequence[int]) -> None:
        settings = config.actor_rollout_ref
        self._cluster, self._teachers, self._actor_timeout_s = cluster, teachers, timeout_of(config, ACTOR_TIMEOUT)
        self._is_hybrid, self._teacher_sleeps = settings.hybrid_engine, settings.teacher.sleep_between_batches
        self._engines = Engines(config, cluster, ids)
        self._memory = PhasePeaks(config, cluster)
        self._teacher_is_awake = False
        self._actor_may_hold_memory = True
        self._metrics: dict[str, float] = {}
        self._turns = Turns(self._switch)
        self._preparation: asyncio.Future[None] | None = None

    def turn(self, phase: DevicePhase) -> AbstractAsyncContextManager[None]:
        """Return a context in which the devices have the models of a phase in their memory."""
        if phase == "score" and not self._teacher_sleeps:
            return nullcontext()
        return self._turns.turn(phase)

    async def sync(self, version: int) -> dict[str, float]:
        """Send the actor's weights to all rollout workers as ``version``, and return metrics."""
        async with self.turn("sync"):
            return await self._engines.sync(version)

    def prepare_update(self) -> None:
        """Enter the phase ``update`` in the background, once no replica generates."""
        if not self._teacher_sleeps and (self._preparation is None or self._preparation.done()):
            self._preparation = asyncio.ensure_future(self._enter_update())
            self._preparation.add_done_callback(_retrieve)

    async def _enter_update(self) -> None:
        async with self.turn("update"):
            pass

    async def take_metrics(self) -> dict[str, float]:
        """Return times of sleep and wake-up, and peaks of the memory, since the last call. Called after an update."""
        if self._is_hybrid:
            await self._memory.record("update")
        taken = self._metrics | self._engines.metrics | self._memory.metrics
        for metrics in (self._metrics, self._engines.metrics, self._memory.metrics):
            metrics.clear()
        return taken

    async def close(self) -> None:
        """Cancel a preparation, which would otherwise replace workers that end on purpose."""
        if self._preparation is not None:
            self._preparation.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._preparation

    async def _switch(self, before: DevicePhase | None, phase: DevicePhase) -> None:
        """Release what the phase does not use, then restore what it uses."""
        if self._is_hybrid:
            await self._memory.record(before)
            await self._release_actor()
        if phase != "generate":
            await self._engines.sleep()
        if self._teacher_is_awake and phase != "score":
            await self._sleep_teacher()
        if phase == "score":
            await self._wake_teacher()
        elif phase == "sync":
            self._actor_may_hold_memory = True
            await self._engines.prepare_sync()
        elif phase == "generate":
            await self._engines.prepare_generation()
        elif self._is_hybrid:
            self._actor_may_hold_memory = True
            await self._call_actors(ActorWorker.prepare_update, phase="return of the actor's states")

    async def _release_actor(self) -> None:
        if self._actor_may_hold_memory:
            await self._call_actors(ActorWorker.release_states, phase="offload of the actor")
            self._actor_may_hold_memory = False

    async def _call_actors(self, method: Callable[[ActorWorker], None], *, phase: str) -> None:
        await self._cluster.actors.call(method, timeout_s=self._actor_timeout_s, phase=phase)

    async def _sleep_teacher(self) -> None:
        with span(self._metrics, "timing/teacher_sleep"):
            await self._teachers.sleep()
        self._teacher_is_awake = False

    async def _wake_teacher(self) -> None:
        self._teacher_is_awake = True  # even if the call fails, because other services may be awake
        with span(self._metrics, "timing/teacher_wake"):
            await self._teachers.wake()


def _retrieve(task: asyncio.Future[None]) -> None:
    """Ignore an error of a preparation: the update itself tries again, and raises it."""
    if not task.cancelled():
        task.exception()
