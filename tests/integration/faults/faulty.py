"""Real workers that send themselves a signal at a chosen moment, and a list of all their processes."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.config import Config
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.process_id import ProcessId, is_alive
from recipe_gkd.trainer import Trainer
from recipe_gkd.workers import Workers

DEADLINE_S = 6.0
TrainerOf = Callable[..., AbstractAsyncContextManager[Trainer]]

MOMENTS = {
    "generate": "recipe_gkd.rollout.engine:RolloutEngine._deliver",
    "receive": "recipe_gkd.weight_sync.collective:Channel.broadcast",
    "load": "recipe_gkd.rollout.vllm_weights:BucketReceiver.finish_weight_update",
    "update": "recipe_gkd.actor.megatron_actor:MegatronActor.update",
    "gather": "recipe_gkd.actor.export:_exchange",
    "broadcast": "recipe_gkd.weight_sync.collective:Channel.broadcast",
}


@dataclass(frozen=True)
class Strike:
    """One that is to come, or has come; on this machine, whose processes have one monotonic clock."""

    pid: int
    note: Path
    """The process writes the time there before it sends itself the signal."""

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.monotonic() - float(self.note.read_text())


async def arm(group: WorkerGroup, rank: int, moment: str, number: int, call: int = 2) -> Strike:
    """Have a worker send itself the signal ``number`` at the ``call``-th call, from 1, of what is called then."""
    strike: Strike = await group.call_one(rank, "strike", moment, number, call, timeout_s=20, phase="arm")
    return strike


def strike(moment: str, number: int, call: int, config: Config) -> Strike:
    """What :func:`arm` does, within the worker."""
    module, _, path = MOMENTS[moment].partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)
    note = Path(config.trainer.default_local_dir) / f"struck-{os.getpid()}"
    note.unlink(missing_ok=True)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, struck)
    return Strike(os.getpid(), note)


class Census:
    """The processes of all workers, and their children, that were there at any time when it was taken."""

    def __init__(self) -> None:
        self._seen: set[ProcessId] = set()

    async def take(self, workers: Workers) -> None:
        places = await locate([*workers.actors.handles, *workers.rollouts.handles])
        self._seen.update(process_trees.tree([place.pid for place in places]))

    def __len__(self) -> int:
        return len(self._seen)

    def alive(self) -> list[str]:
        return [
            f"{process.pid}: {' '.join(psutil.Process(process.pid).cmdline())}"
            for process in self._seen
            if is_alive(process)
        ]


def lives(pid: int) -> bool:
    """Whether the process is there, and is not only waiting to be reaped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class FaultyRollout(RolloutWorker):
    async def strike(self, moment: str, number: int, call: int) -> Strike:
        return strike(moment, number, call, self._config)


class FaultyActor(ActorWorker):
    def strike(self, moment: str, number: int, call: int) -> Strike:
        return strike(moment, number, call, self._config)
