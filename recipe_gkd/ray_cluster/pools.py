"""Resource pools of the actor and rollout workers, as Ray placement groups.

A pool is ``nnodes`` bundles of ``n_per_node`` slots. A slot is one GPU and one CPU. With ``trainer.device=cpu`` it is
one CPU, so that the same numbers give the same processes.

With ``hybrid_engine`` the rollout workers are guests in the slots of the actor pool. The actor ranks hold the slots. A
rollout worker requests nothing from Ray: it is started on the node of its actor ranks, with their GPUs visible. Ray
itself could not place an engine on parts of several GPUs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipe_gkd.config import Config
from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster.node_probe import node_addresses, own_node, start_probe
from recipe_gkd.runtime.wait_log import waiting

ASYNC_CONCURRENCY = 1_000_000
"""Maximum number of calls that an asynchronous worker runs at a time. Each open turn of a conversation is a call. With
Ray's default of 1000, a weight update waits for turns that wait for this update."""


@dataclass(frozen=True)
class PoolSpec:
    """Requested size of a pool.

    Attributes:
        name: ``"actor"`` or ``"rollout"``.
        nnodes: Number of nodes, one bundle on each.
        n_per_node: Slots on each node.
        device: ``"cpu"`` or ``"cuda"``.
        size_keys: Config keys that set the size, for messages.
        slots_per_worker: Slots that a worker occupies.
        is_guest: True if the workers use the slots of the other pool and hold none themselves.
    """

    name: str
    nnodes: int
    n_per_node: int
    device: str
    size_keys: str
    slots_per_worker: int = 1
    is_guest: bool = False

    @property
    def n_workers(self) -> int:
        """Number of workers of the pool."""
        return self.nnodes * self.n_per_node // self.slots_per_worker

    @property
    def slot_kind(self) -> str:
        """Name of the slots, for messages."""
        return "CPU slots" if self.device == "cpu" else "GPUs"

    @property
    def slot(self) -> dict[str, float]:
        """Ray resources of one slot."""
        return {"CPU": 1} if self.device == "cpu" else {"CPU": 1, "GPU": 1}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray resources needed on each node."""
        return [{kind: n * self.n_per_node for kind, n in self.slot.items()} for _ in range(self.nnodes)]


@dataclass(frozen=True)
class Pool:
    """A pool that the cluster has granted.

    Attributes:
        spec: Size of the pool.
        group: Ray's reservation. Guests have the reservation of the actor pool.
    """

    spec: PoolSpec
    group: PlacementGroup

    def spawn(
        self, worker: type, rank: int, arguments: dict[str, Any], *, env: dict[str, str] | None = None
    ) -> ActorHandle:
        """Start ``worker(**arguments)`` in the slots of ``rank``. Ranks fill one node after the other.

        After a worker has died, another worker of the same rank can be started in its slots.

        Args:
            worker: Class of the Ray actor.
            rank: Rank of the worker in the pool.
            arguments: Keyword arguments of the constructor.
            env: Environment variables of the worker's process.

        Returns:
            Handle of the Ray actor.
        """
        bundle = rank * self.spec.slots_per_worker // self.spec.n_per_node
        slots = 0 if self.spec.is_guest else self.spec.slots_per_worker
        is_async = any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(worker))
        remote: Any = ray.remote(worker)
        return remote.options(
            num_cpus=slots,
            num_gpus=slots * self.spec.slot.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            max_restarts=0,
            max_concurrency=ASYNC_CONCURRENCY if is_async else 1,
            runtime_env={"env_vars": env or {}},
        ).remote(**arguments)

    def nodes(self) -> dict[str, str]:
        """Return the address of each node of the pool by Ray's id of the node, in the order of the bundles."""
        node_of = placement_group_table(self.group)["bundles_to_node_id"]
        addresses = node_addresses()
        return {node_of[bundle]: addresses[node_of[bundle]] for bundle in sorted(node_of)}

    def release(self) -> None:
        """Return the resources to the cluster."""
        remove_placement_group(self.group)


def pool_specs(config: Config, device: str) -> tuple[PoolSpec, PoolSpec]:
    """Return the configured sizes of the actor pool and of the rollout pool."""
    trainer, is_hybrid = config.trainer, config.actor_rollout_ref.hybrid_engine
    (rollout_nodes, rollout_each), tp = config.rollout_pool, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    keys = "trainer.nnodes x trainer.n_gpus_per_node", "rollout.nnodes x rollout.n_gpus_per_node"
    return (
        PoolSpec("actor", trainer.nnodes, trainer.n_gpus_per_node, device, keys[0]),
        PoolSpec("rollout", rollout_nodes, rollout_each, device, keys[not is_hybrid], tp, is_guest=is_hybrid),
    )


async def create_pools(specs: tuple[PoolSpec, ...], *, timeout_s: float) -> tuple[Pool, ...]:
    """Reserve all pools.

    Args:
        specs: Sizes of the pools.
        timeout_s: Time that Ray gets to grant the reservations.

    Returns:
        The pools, in the order of ``specs``.

    Raises:
        ResourceError: The cluster is too small, or other jobs held its resources until the deadline. ``details`` lists
            the request and the resources of each node. Nothing remains reserved.
    """
    resources = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if choose_nodes(specs, resources) is None:
        shortage = _describe_shortage(specs, resources)
        raise ResourceError(f"not enough {specs[0].slot_kind} for the workers", details=shortage)
    groups = [
        placement_group(spec.bundles, strategy="STRICT_SPREAD" if spec.nnodes > 1 else "STRICT_PACK")
        for spec in _hosts(specs)
    ]
    try:
        names = {f"the {spec.name} pool, which Ray has not granted yet": 1 for spec in _hosts(specs)}
        async with asyncio.timeout(timeout_s):
            with waiting("start, reserve the pools", timeout_s, lambda: names):
                for group in groups:
                    await group.ready()
    except BaseException as error:
        for group in groups:
            remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise ResourceError(
                f"the pools were not granted within {timeout_s:g} s: the cluster is large enough, but other jobs use "
                "it now",
                waited_s=timeout_s,
                remedy="check `ray status`",
                details=_describe_shortage(specs, resources),
            ) from error
        raise
    for node in _nodes_of(groups) - {own_node()}:
        start_probe(node)
    return tuple(Pool(spec, group) for spec, group in zip(specs, groups * len(specs), strict=False))


def choose_nodes(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> list[list[int]] | None:
    """Assign each bundle of each pool to a node.

    Bundles of one pool get different nodes. The largest bundles are placed first, each on the node with the least
    remaining capacity (best fit). Guests need no bundles.

    Args:
        specs: Sizes of the pools.
        nodes: Ray resources of each node.

    Returns:
        For each pool that holds slots, the index of the node of each bundle. None if the pools do not fit.
    """
    free = [Counter(node) for node in nodes]
    hosts = _hosts(specs)
    chosen: dict[str, list[int]] = {}
    for spec in sorted(hosts, key=lambda spec: -spec.n_per_node):
        used = chosen.setdefault(spec.name, [])
        for bundle in spec.bundles:
            candidates = [
                i for i, node in enumerate(free) if i not in used and all(node[kind] >= n for kind, n in bundle.items())
            ]
            if not candidates:
                return None
            used.append(best := min(candidates, key=lambda i: free[i]["GPU"] or free[i]["CPU"]))
            free[best].subtract(bundle)
    return [chosen[spec.name] for spec in hosts]


def _hosts(specs: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
    """Return the pools that hold slots."""
    return tuple(spec for spec in specs if not spec.is_guest)


def _nodes_of(groups: list[PlacementGroup]) -> set[str]:
    return {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}


def _describe_shortage(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> tuple[str, ...]:
    requested = [
        f"  {spec.name} pool: {spec.nnodes} x {spec.n_per_node} {spec.slot_kind}   ({spec.size_keys})" for spec in specs
    ]
    available = [
        f"  node {i}: " + ", ".join(f"{node.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
        for i, node in enumerate(nodes)
    ]
    remedy = "request less, or start Ray with more"
    if specs[-1].is_guest:
        requested.append("  (actor_rollout_ref.hybrid_engine=true: rollout workers use the slots of the actor pool)")
    if specs[0].device == "cpu":
        remedy += " (ray_init.num_cpus=N lets N one-thread workers share this machine's cores)"
    return "requested:", *requested, "the cluster has:", *available, remedy
