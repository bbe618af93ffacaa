"""Resources that a cluster can grant to this run: those of its own two pools, and those that are free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group_table

from recipe_gkd.ray_cluster.node_probe import own_node
from recipe_gkd.ray_cluster.pools import Pool, PoolSpec, choose_nodes

PoolSize = tuple[int, int]
"""Nodes, devices on each."""


@dataclass(frozen=True)
class ClusterCapacity:
    """Resources that the pools of this run could have.

    Attributes:
        specs: The actor pool and the rollout pool as they are.
        nodes: Resources of each node that no one else uses. On a CPU, a node has no more slots than cores.
        cores: CPU cores of all nodes, which the pools share; None if the devices are GPUs.
    """

    specs: tuple[PoolSpec, PoolSpec]
    nodes: tuple[Mapping[str, float], ...]
    cores: float | None

    def grants(self, actor: PoolSize, rollout: PoolSize) -> bool:
        """Return True if the cluster has room for pools of these sizes."""
        sizes = zip(self.specs, (actor, rollout), strict=True)
        larger = tuple(replace(spec, nnodes=nodes, n_per_node=each) for spec, (nodes, each) in sizes)
        return choose_nodes(larger, [dict(node) for node in self.nodes]) is not None


def cluster_capacity(pools: Sequence[Pool]) -> ClusterCapacity:
    """Read the capacity from Ray; ``pools`` are the actor pool and the rollout pool, which it has granted."""
    actor, rollout = pools
    held: dict[str, dict[str, float]] = {}
    for group in {pool.group.id: pool.group for pool in pools}.values():
        table = placement_group_table(group)
        for bundle, node in table["bundles_to_node_id"].items():
            own = held.setdefault(node, {})
            for what, amount in table["bundles"][bundle].items():
                own[what] = own.get(what, 0) + amount
    free, on_cpu = available_resources_per_node(), actor.spec.device == "cpu"
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            of = partial(_usable, node["Resources"], free.get(node["NodeID"], {}), held.get(node["NodeID"], {}))
            limit = physical_cores() if on_cpu and node["NodeID"] == own_node() else None
            nodes.append({"CPU": of("CPU", limit), "GPU": of("GPU", None)})
    cores = sum(node["CPU"] for node in nodes) if on_cpu else None
    return ClusterCapacity((actor.spec, rollout.spec), tuple(nodes), cores)


def physical_cores() -> int:
    """Return the cores of this machine that this process may use: hardware threads of one core count once."""
    return min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False) or psutil.cpu_count() or 1)


def _usable(
    total: Mapping[str, float], free: Mapping[str, float], held: Mapping[str, float], what: str, limit: float | None
) -> float:
    usable = min(total.get(what, 0), free.get(what, 0) + held.get(what, 0))
    return usable if limit is None else min(usable, limit)
