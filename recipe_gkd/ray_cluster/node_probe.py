"""Which process a Ray actor is, and how to reach its node without asking the actor itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import ray
from ray._private.state import state as ray_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

_RAY_KILLS_S = 0.3
"""How long a process that Ray was told to kill may take to end; Ray itself waits 5 s for one that does not answer."""


@dataclass(frozen=True)
class ActorLocation:
    """Where Ray runs an actor, or ran it last; ``pid`` 0 and no ``node_id`` before it has started."""

    pid: int
    node_id: str
    node_ip: str
    dead: bool
    cause: str


class NodeProbe:
    """Runs functions on the node where it lives."""

    def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


def start_probe(node_id: str) -> Any:
    """This job's probe on a node, which lives as long as the job; a process takes seconds to start, so do it early."""
    return _start_probe(node_id, ray.get_runtime_context().get_job_id())


@cache
def _start_probe(node_id: str, job_id: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(NodeProbe)
    return remote.options(num_cpus=0, max_concurrency=8, max_restarts=-1, scheduling_strategy=there).remote()


def own_node() -> str:
    return ray.get_runtime_context().get_node_id()


async def locate(handles: Sequence[Any]) -> list[ActorLocation]:
    """Asks Ray's control service, so that it does not matter whether the actors answer."""
    return await in_thread(lambda: [_locate(handle) for handle in handles])


async def run_on_node(node_id: str, function: Callable[..., T], *args: Any) -> T:
    """In a thread of this process if the node is its own, else by a probe."""
    if node_id == own_node():
        return await in_thread(function, *args)
    result: T = await start_probe(node_id).run.remote(function, *args)
    return result


async def end_workers(handles: Sequence[Any], *, timeout_s: float) -> None:
    """Kill actors, and see that their processes and all that these have started are gone; never takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            pids: dict[str, list[int]] = {}
            for place in await locate(handles):
                if place.pid and not place.dead:  # that pid of a dead one may be another process's by now
                    pids.setdefault(place.node_id, []).append(place.pid)
            # Their children are looked up first: those of a process that has ended are nobody's.
            trees = await _on_nodes({node: (process_trees.tree, own) for node, own in pids.items()})
            _kill(handles)
            ends = {node: (process_trees.end, tree, _RAY_KILLS_S, timeout_s) for node, tree in trees.items() if tree}
            if left := {node: own for node, own in (await _on_nodes(ends)).items() if own}:
                log.warning("processes that could not be ended (node: pids): %s", left)
    except TimeoutError:
        log.warning("that all processes of these workers have ended could not be verified within %g s", timeout_s)
    finally:
        _kill(handles)


async def _on_nodes(calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Node -> result of its (function, *arguments); nodes that are dead are left out."""
    results = await asyncio.gather(*(run_on_node(node, *call) for node, call in calls.items()), return_exceptions=True)
    for node, result in zip(calls, results, strict=True):
        if isinstance(result, BaseException):
            log.warning("node %s: %s", node, result)
    return {node: result for node, result in zip(calls, results, strict=True) if not isinstance(result, BaseException)}


def _kill(handles: Sequence[Any]) -> None:
    for handle in handles:
        ray.kill(handle, no_restart=True)


def _locate(handle: Any) -> ActorLocation:
    info = ray_state.actor_table(handle._actor_id.hex())
    address = info.get("Address", {})
    dead = info.get("State") == "DEAD"
    cause = info["DeathCause"].actor_died_error_context.error_message.split(" Some common")[0] if dead else ""
    return ActorLocation(info.get("Pid", 0), address.get("NodeID", ""), address.get("IPAddress", ""), dead, cause)
