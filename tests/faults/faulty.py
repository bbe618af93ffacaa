"""Real workers that send themselves a signal at a chosen moment."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import psutil

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.trainer import Trainer

DEADLINE_S = 6.0
TrainerOf = Callable[..., AbstractAsyncContextManager[Trainer]]

MOMENTS = {
    "generate": "recipe_gkd.rollout.engine:RolloutEngine._deliver",
    "receive": "recipe_gkd.weights.channel:Channel.broadcast",
    "load": "recipe_gkd.rollout.vllm_weights:BucketReceiver.finish_weight_update",
    "update": "recipe_gkd.actor.megatron_actor:MegatronActor.update",
    "gather": "recipe_gkd.actor.export:_exchange",
    "broadcast": "recipe_gkd.weights.channel:Channel.broadcast",
}


def strike(moment: str, number: int, call: int) -> None:
    """Send this process the signal ``number`` at the ``call``-th call, from 1, of what is called at that moment."""
    module, _, path = MOMENTS[moment].partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, struck)


def lives(pid: int) -> bool:
    """Whether the process is there, and is not only waiting to be reaped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class FaultyRollout(RolloutWorker):
    async def strike(self, moment: str, number: int, call: int = 2) -> int:
        strike(moment, number, call)
        return os.getpid()


class FaultyActor(ActorWorker):
    def strike(self, moment: str, number: int, call: int = 2) -> int:
        strike(moment, number, call)
        return os.getpid()
