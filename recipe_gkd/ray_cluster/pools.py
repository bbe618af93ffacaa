"""Resource pools: what the actor and the rollout workers may use, as Ray placement groups.

A pool is ``nnodes`` bundles of ``n_per_node`` slots. A slot is a GPU with a CPU, or with ``trainer.device=cpu`` just a
CPU, so that the same numbers lay out the same processes. Pools that share their slots (``rollout.share_actor_gpus``)
are one placement group of a bundle a slot: of a larger bundle, Ray takes the half of whichever GPU it likes.
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
    """``nnodes x n_per_node`` slots of one ``device`` (`cpu` or `cuda`)."""

    name: str
    nnodes: int
    n_per_node: int
    device: str
    sizes: str
    """The config keys that set the size, for messages."""
    per_worker: int = 1
    """Slots that a worker takes."""
    shared: bool = False
    """Whether each slot is divided between a worker of this pool and one of the other."""

    @property
    def n_workers(self) -> int:
        return self.nnodes * self.n_per_node // self.per_worker

    @property
    def what(self) -> str:
        return "CPU slots" if self.device == "cpu" else "GPUs"

    @property
    def slot(self) -> dict[str, float]:
        return {"CPU": 1} if self.device == "cpu" else {"CPU": 1, "GPU": 1}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What is needed of each node."""
        return [{what: n * self.n_per_node for what, n in self.slot.items()} for _ in range(self.nnodes)]


@dataclass(frozen=True)
class Pool:
    """A pool that the cluster has granted."""

    spec: PoolSpec
    group: PlacementGroup

    def spawn(self, worker: type, rank: int, arguments: dict[str, Any], *, env: dict[str, str] | None = None) -> Any:
        """Start ``worker(**arguments)`` in the slots of ``rank``: ranks fill node after node.

        One that has died leaves its slots to the next of its rank.
        """
        bundle = rank if self.spec.shared else rank * self.spec.per_worker // self.spec.n_per_node
        slots = self.spec.per_worker * (0.5 if self.spec.shared else 1)
        remote: Any = ray.remote(
            num_cpus=slots,
            num_gpus=slots * self.spec.slot.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            max_restarts=0,
            runtime_env={"env_vars": env or {}},
        )(worker)
        return remote.remote(**arguments)

    def release(self) -> None:
        remove_placement_group(self.group)


def pool_specs(config: Config, device: str) -> tuple[PoolSpec, PoolSpec]:
    """The actor pool and the rollout pool."""
    trainer, rollout = config.trainer, config.rollout
    shared, tp = rollout.share_actor_gpus, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    sizes = "trainer.nnodes x trainer.n_gpus_per_node", "rollout.nnodes x rollout.n_gpus_per_node"
    return (
        PoolSpec("actor", trainer.nnodes, trainer.n_gpus_per_node, device, sizes[0], shared=shared),
        PoolSpec("rollout", rollout.nnodes, rollout.n_gpus_per_node, device, sizes[1], tp, shared),
    )


async def create_pools(specs: tuple[PoolSpec, ...], *, timeout_s: float) -> tuple[Pool, ...]:
    """Reserve all pools, or raise :class:`ResourceError` at once, saying what was asked and what the cluster has."""
    nodes = {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    resources = list(nodes.values())
    chosen = choose_nodes(specs, resources)
    if chosen is None:
        raise ResourceError(f"not enough {specs[0].what} for the two pools.\n{_asked_and_there(specs, resources)}")
    if specs[0].shared:  # their nodes are named, so Ray cannot look for others when somebody holds these
        free = available_resources_per_node()
        chosen = choose_nodes(specs, [free.get(node, {}) for node in nodes]) or chosen
    groups = [_reserve(spec, [list(nodes)[i] for i in own]) for spec, own in zip(_distinct(specs), chosen, strict=True)]
    try:
        async with asyncio.timeout(timeout_s):
            for group in groups:
                await group.ready()
    except BaseException as error:
        for group in groups:
            remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise ResourceError(
                f"the pools were not granted within {timeout_s:g} s: the cluster is large enough, but others use it "
                f"now; see `ray status`.\n{_asked_and_there(specs, resources)}"
            ) from error
        raise
    for node in _nodes_of(groups) - {own_node()}:
        start_probe(node)
    return tuple(Pool(spec, group) for spec, group in zip(specs, groups * len(specs), strict=False))


def choose_nodes(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> list[list[int]] | None:
    """For each pool (shared ones are one), a node of its own for each of its bundles; None if they do not fit.

    Largest bundles first, each where least is left over.
    """
    free = [Counter(node) for node in nodes]
    distinct = _distinct(specs)
    chosen: dict[str, list[int]] = {}
    for spec in sorted(distinct, key=lambda spec: -spec.n_per_node):
        used = chosen.setdefault(spec.name, [])
        for bundle in spec.bundles:
            roomy = [
                i for i, node in enumerate(free) if i not in used and all(node[what] >= n for what, n in bundle.items())
            ]
            if not roomy:
                return None
            used.append(best := min(roomy, key=lambda i: free[i]["GPU"] or free[i]["CPU"]))
            free[best].subtract(bundle)
    return [chosen[spec.name] for spec in distinct]


def _distinct(specs: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
    return specs[:1] if specs[0].shared else specs


def _reserve(spec: PoolSpec, nodes: list[str]) -> PlacementGroup:
    """Bundles by rank: one a node; or of shared slots one a slot, which only naming the ``nodes`` keeps together."""
    if not spec.shared:
        return placement_group(spec.bundles, strategy="STRICT_SPREAD" if spec.nnodes > 1 else "STRICT_PACK")
    selectors = [{"ray.io/node-id": node} for node in nodes for _ in range(spec.n_per_node)]
    return placement_group([spec.slot] * len(selectors), strategy="PACK", bundle_label_selector=selectors)


def _nodes_of(groups: list[PlacementGroup]) -> set[str]:
    return {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}


def _asked_and_there(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> str:
    def amount(resources: dict[str, float]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))

    asked = "\n".join(
        f"  {spec.name} pool: {spec.nnodes} x {spec.n_per_node} {spec.what}   ({spec.sizes})" for spec in specs
    )
    there = "\n".join(f"  node {i}: {amount(node)}" for i, node in enumerate(nodes))
    remedy = "ask for less, or start Ray with more"
    if specs[0].shared:
        asked += "\n  (rollout.share_actor_gpus=true: the two pools are the same slots)"
    if specs[0].device == "cpu":
        remedy += " (ray_init.num_cpus=N lets N one-thread workers share this machine's cores)"
    return f"asked:\n{asked}\nthe cluster has:\n{there}\n{remedy}"
