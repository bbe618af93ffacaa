"""Location of Ray actors, and functions that run on an actor's node without the actor's cooperation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, TypeVarTuple

import ray
from ray._private.state import state as ray_state
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RAY_KILL_GRACE_S = 0.3
"""Time that a process gets to exit after ``ray.kill``. Ray itself waits 5 s for a process that does not answer."""


@dataclass(frozen=True)
class ActorLocation:
    """Process and node where Ray runs an actor, or ran it last.

    Attributes:
        pid: Process id on its node. 0 before the actor has started.
        node_id: Ray's id of the node, in hex. Empty before the actor has started.
        node_ip: Address of the node.
        dead: True if Ray has declared the actor dead.
        cause: Ray's explanation of the death. Empty for a live actor.
        n_restarts: Number of times that Ray has started the actor again.
    """

    pid: int
    node_id: str
    node_ip: str
    dead: bool
    cause: str
    n_restarts: int = 0


class NodeProbe:
    """Ray actor that runs functions on its node."""

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return ``function(*args)``."""
        return function(*args)


def start_probe(node_id: str) -> Any:
    """Return the handle of this job's probe on a node, and start the probe at the first call.

    The probe lives as long as the job. Its process takes seconds to start, so call this before it is needed.
    """
    return _start_probe(node_id, ray.get_runtime_context().get_job_id())


@cache
def _start_probe(node_id: str, job_id: str) -> Any:
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(NodeProbe)
    return remote.options(num_cpus=0, max_concurrency=8, max_restarts=-1, scheduling_strategy=on_node).remote()


def own_node() -> str:
    """Return Ray's id of the node of this process."""
    return ray.get_runtime_context().get_node_id()


def session_folder() -> str:
    """Return the folder of the session of the connected cluster, which has the same path on each node.

    After the end of the connection it is a description for messages.
    """
    node = ray._private.worker.global_worker.node
    return "the folder of Ray's session" if node is None else str(node.address_info["session_dir"])


def node_addresses() -> dict[str, str]:
    """Return the address of each node that the cluster has or had, by Ray's id of the node."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


async def locate(handles: Sequence[ActorHandle]) -> list[ActorLocation]:
    """Return the location of each actor. The source is Ray's control service, so hung actors are located too."""
    return await in_thread(lambda: [_locate(handle) for handle in handles])


async def run_on_node(node_id: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return ``function(*args)``, computed on a node.

    On the node of this process it runs in a thread, on any other node in the probe. It has no deadline.
    """
    if node_id == own_node():
        return await in_thread(function, *args)
    result: T = await start_probe(node_id).run.remote(function, *args)
    return result


async def kill_workers(handles: Sequence[ActorHandle], *, timeout_s: float) -> None:
    """Kill actors with all processes that they have started, and wait until these have ended.

    Logs a warning and returns after ``timeout_s``. An error of Ray is raised after the kill was requested.
    """
    try:
        async with asyncio.timeout(timeout_s):
            pids_by_node: dict[str, list[int]] = {}
            for location in await locate(handles):
                if location.pid and not location.dead:  # another process may have the pid of a dead actor by now
                    pids_by_node.setdefault(location.node_id, []).append(location.pid)
            # Children must be listed before the kill. A process that has ended is no longer their parent.
            trees = await _on_nodes({node: (process_trees.tree, pids) for node, pids in pids_by_node.items()})
            _kill(handles)
            kills = {
                node: (process_trees.end, tree, _RAY_KILL_GRACE_S, timeout_s) for node, tree in trees.items() if tree
            }
            survivors = {node: pids for node, pids in (await _on_nodes(kills)).items() if pids}
            if survivors:
                log.warning("processes that could not be killed (node: pids): %s", survivors)
    except TimeoutError:
        log.warning("could not verify within %g s that all processes of these workers have ended", timeout_s)
    finally:
        _kill(handles)


async def _on_nodes(calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Run one call per node at the same time.

    Args:
        calls: Node id -> (function, argument, ...).

    Returns:
        Node id -> result. Nodes that failed are logged and left out.
    """
    outcomes = await asyncio.gather(*(run_on_node(node, *call) for node, call in calls.items()), return_exceptions=True)
    results = {}
    for node, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            log.warning("node %s: %s", node, outcome)
        else:
            results[node] = outcome
    return results


def _kill(handles: Sequence[ActorHandle]) -> None:
    for handle in handles:
        ray.kill(handle, no_restart=True)


def _locate(handle: ActorHandle) -> ActorLocation:
    info = ray_state.actor_table(handle._actor_id.hex())
    address = info.get("Address", {})
    dead = info.get("State") == "DEAD"
    cause = info["DeathCause"].actor_died_error_context.error_message.split(" Some common")[0] if dead else ""
    node_id, node_ip = address.get("NodeID", ""), address.get("IPAddress", "")
    return ActorLocation(info.get("Pid", 0), node_id, node_ip, dead, cause, info.get("NumRestarts", 0))
