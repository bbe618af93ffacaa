"""Real workers that send themselves a signal at a chosen point of their code, and a census of their processes."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import psutil

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.cluster import Cluster
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.runtime import process_trees
from recipe_gkd.trainer import Trainer
from teacher.common.process_id import ProcessId, is_alive
from tests._support.waiting import PATIENCE_S

DEADLINE_S = 20.0
"""Deadline of all calls to workers: under 1 s is needed on an idle machine, more than 8 s on a slow and busy one."""
TrainerFactory = Callable[..., AbstractAsyncContextManager[Trainer]]

INJECTION_POINTS = {
    "generate": "recipe_gkd.rollout.engine:RolloutEngine._deliver",
    "receive": "recipe_gkd.weight_sync.collective:CollectiveTransport.broadcast",
    "load": "recipe_gkd.rollout.vllm.weights:BucketReceiver.finish_weight_update",
    "update": "recipe_gkd.actor.update:Updater.update",
    "gather": "recipe_gkd.actor.megatron.export:_exchange",
    "broadcast": "recipe_gkd.weight_sync.collective:CollectiveTransport.broadcast",
    "ipc": "recipe_gkd.weight_sync.ipc:IpcTransport.broadcast",
    "sleep": "recipe_gkd.rollout.engine_sleep:EngineSleep.sleep",
    "wake": "recipe_gkd.rollout.engine_sleep:EngineSleep.wake",
    "log_probs": "recipe_gkd.rollout.engine:RolloutEngine.log_probs",
}
"""Name of a point -> function of the worker that sends the signal before it runs."""


async def inject(group: WorkerGroup[FaultyActor], rank: int, point: str, number: int, call: int = 2) -> int:
    """Make a worker send itself a signal, and return its pid.

    Args:
        point: Key of :data:`INJECTION_POINTS`.
        number: Number of the signal.
        call: Call of that function that sends the signal. The first one is 1.
    """
    return await group.call_one(rank, FaultyActor.inject, point, number, call, timeout_s=PATIENCE_S, phase="inject")


def inject_here(point: str, number: int, call: int) -> int:
    """Do the work of :func:`inject` in the process of the worker."""
    module, _, path = INJECTION_POINTS[point].partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)

    def with_signal(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, with_signal)
    return os.getpid()


class FaultyRollout(RolloutWorker):
    async def inject(self, point: str, number: int, call: int) -> int:
        return inject_here(point, number, call)


class FaultyActor(ActorWorker):
    def inject(self, point: str, number: int, call: int) -> int:
        return inject_here(point, number, call)


class Census:
    """All processes of the workers and their children that any :meth:`take` has found."""

    def __init__(self) -> None:
        self._seen: set[ProcessId] = set()

    async def take(self, cluster: Cluster) -> None:
        locations = await locate([*cluster.actors.handles, *cluster.rollouts.handles])
        self._seen.update(process_trees.tree([location.pid for location in locations]))

    def __len__(self) -> int:
        return len(self._seen)

    def alive(self) -> list[str]:
        """Return pid and command of each process that still runs."""
        return [
            f"{process.pid}: {' '.join(psutil.Process(process.pid).cmdline())}"
            for process in self._seen
            if is_alive(process)
        ]
