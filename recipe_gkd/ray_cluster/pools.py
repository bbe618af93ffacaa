"""Resource pools of the actor and rollout workers, as Ray placement groups.

A pool is ``nnodes`` bundles of ``n_per_node`` slots. A slot is one GPU and one CPU. With ``trainer.device=cpu`` it is
one CPU, so that the same numbers give the same processes.

Pools that share their slots (``rollout.share_actor_gpus``) are one placement group with one bundle per slot. In a
larger bundle, Ray would choose the GPU of each half slot freely.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipe_gkd.config import Config
from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster.node_probe import own_node, start_probe


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
        shared: True if a worker of this pool and a worker of the other pool divide each slot.
    """

    name: str
    nnodes: int
    n_per_node: int
    device: str
    size_keys: str
    slots_per_worker: int = 1
    shared: bool = False

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
        group: Ray's reservation. Pools that share their slots have the same group.
    """

    spec: PoolSpec
    group: PlacementGroup

    def spawn(self, worker: type, rank: int, arguments: dict[str, Any], *, env: dict[str, str] | None = None) -> Any:
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
        bundle = rank if self.spec.shared else rank * self.spec.slots_per_worker // self.spec.n_per_node
        slots = self.spec.slots_per_worker * (0.5 if self.spec.shared else 1)
        remote: Any = ray.remote(
            num_cpus=slots,
            num_gpus=slots * self.spec.slot.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            max_restarts=0,
            runtime_env={"env_vars": env or {}},
        )(worker)
        return remote.remote(**arguments)

    def release(self) -> None:
        """Return the resources to the cluster."""
        remove_placement_group(self.group)


def pool_specs(config: Config, device: str) -> tuple[PoolSpec, PoolSpec]:
    """Return the configured sizes of the actor pool and of the rollout pool."""
    trainer, rollout = config.trainer, config.rollout
    shared, tp = rollout.share_actor_gpus, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    keys = "trainer.nnodes x trainer.n_gpus_per_node", "rollout.nnodes x rollout.n_gpus_per_node"
    return (
        PoolSpec("actor", trainer.nnodes, trainer.n_gpus_per_node, device, keys[0], shared=shared),
        PoolSpec("rollout", rollout.nnodes, rollout.n_gpus_per_node, device, keys[1], tp, shared),
    )


async def create_pools(specs: tuple[PoolSpec, ...], *, timeout_s: float) -> tuple[Pool, ...]:
    """Reserve all pools.

    Args:
        specs: Sizes of the pools.
        timeout_s: Time that Ray gets to grant the reservations.

    Returns:
        The pools, in the order of ``specs``.

    Raises:
        ResourceError: The cluster is too small, or other jobs held its resources until the deadline. The message lists
            the request and the resources of each node. Nothing remains reserved.
    """
    nodes = {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    resources = list(nodes.values())
    chosen = choose_nodes(specs, resources)
    if chosen is None:
        raise ResourceError(
            f"not enough {specs[0].slot_kind} for the two pools.\n{_describe_shortage(specs, resources)}"
        )
    if specs[0].shared:
        # The reservation names its nodes, so Ray cannot choose others. Prefer nodes that are free now.
        free = available_resources_per_node()
        chosen = choose_nodes(specs, [free.get(node, {}) for node in nodes]) or chosen
    groups = [
        _reserve(spec, [list(nodes)[i] for i in indices])
        for spec, indices in zip(_distinct(specs), chosen, strict=True)
    ]
    try:
        async with asyncio.timeout(timeout_s):
            for group in groups:
                await group.ready()
    except BaseException as error:
        for group in groups:
            remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise ResourceError(
                f"the pools were not granted within {timeout_s:g} s: the cluster is large enough, but other jobs use "
                f"it now; check `ray status`.\n{_describe_shortage(specs, resources)}"
            ) from error
        raise
    for node in _nodes_of(groups) - {own_node()}:
        start_probe(node)
    return tuple(Pool(spec, group) for spec, group in zip(specs, groups * len(specs), strict=False))


def choose_nodes(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> list[list[int]] | None:
    """Assign each bundle of each pool to a node.

    Bundles of one pool get different nodes. The largest bundles are placed first, each on the node with the least
    remaining capacity (best fit). Pools that share their slots count as one pool.

    Args:
        specs: Sizes of the pools.
        nodes: Ray resources of each node.

    Returns:
        For each distinct pool, the index of the node of each bundle. None if the pools do not fit.
    """
    free = [Counter(node) for node in nodes]
    distinct = _distinct(specs)
    chosen: dict[str, list[int]] = {}
    for spec in sorted(distinct, key=lambda spec: -spec.n_per_node):
        used = chosen.setdefault(spec.name, [])
        for bundle in spec.bundles:
            candidates = [
                i for i, node in enumerate(free) if i not in used and all(node[kind] >= n for kind, n in bundle.items())
            ]
            if not candidates:
                return None
            used.append(best := min(candidates, key=lambda i: free[i]["GPU"] or free[i]["CPU"]))
            free[best].subtract(bundle)
    return [chosen[spec.name] for spec in distinct]


def _distinct(specs: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
    return specs[:1] if specs[0].shared else specs


def _reserve(spec: PoolSpec, node_ids: list[str]) -> PlacementGroup:
    """Create a placement group whose bundles are in rank order: one per node, or one per slot if slots are shared."""
    if not spec.shared:
        return placement_group(spec.bundles, strategy="STRICT_SPREAD" if spec.nnodes > 1 else "STRICT_PACK")
    # Only a label selector keeps the slots of one node together.
    selectors = [{"ray.io/node-id": node_id} for node_id in node_ids for _ in range(spec.n_per_node)]
    return placement_group([spec.slot] * len(selectors), strategy="PACK", bundle_label_selector=selectors)


def _nodes_of(groups: list[PlacementGroup]) -> set[str]:
    return {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}


def _describe_shortage(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> str:
    requested = "\n".join(
        f"  {spec.name} pool: {spec.nnodes} x {spec.n_per_node} {spec.slot_kind}   ({spec.size_keys})" for spec in specs
    )
    available = "\n".join(
        f"  node {i}: " + ", ".join(f"{node.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
        for i, node in enumerate(nodes)
    )
    remedy = "request less, or start Ray with more"
    if specs[0].shared:
        requested += "\n  (rollout.share_actor_gpus=true: both pools use the same slots)"
    if specs[0].device == "cpu":
        remedy += " (ray_init.num_cpus=N lets N one-thread workers share this machine's cores)"
    return f"requested:\n{requested}\nthe cluster has:\n{available}\n{remedy}"
