"""Resources of the Ray cluster that this run could use: the run's two pools, and free resources."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from recipe_gkd.ray_cluster.node_probe import own_node
from recipe_gkd.ray_cluster.pools import Pool, PoolSpec, choose_nodes
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)

PoolSize = tuple[int, int]
"""Number of nodes, devices on each node."""

Resources = Mapping[str, float]
"""Ray resource name (``CPU``, ``GPU``) -> amount."""


@dataclass(frozen=True)
class ClusterCapacity:
    """Resources that the pools of this run could have.

    Attributes:
        specs: Current sizes of the actor pool and of the rollout pool.
        nodes: For each node, the resources that no other job uses. On a CPU, a node has no more slots than cores.
        cores: CPU cores of all nodes, which both pools share. None if the devices are GPUs.
    """

    specs: tuple[PoolSpec, PoolSpec]
    nodes: tuple[Resources, ...]
    cores: float | None

    def grants(self, actor: PoolSize, rollout: PoolSize) -> bool:
        """Return True if pools of these sizes fit into the cluster at the same time."""
        sizes = zip(self.specs, (actor, rollout), strict=True)
        resized = tuple(replace(spec, nnodes=nnodes, n_per_node=each) for spec, (nnodes, each) in sizes)
        return choose_nodes(resized, [dict(node) for node in self.nodes]) is not None


def cluster_capacity(pools: Sequence[Pool]) -> ClusterCapacity:
    """Read the capacity from Ray.

    Args:
        pools: The actor pool and the rollout pool of this run, both granted.
    """
    actor, rollout = pools
    held_by_node = _resources_held_by(pools)
    free_by_node = available_resources_per_node()
    on_cpu = actor.spec.device == "cpu"
    nodes: list[Resources] = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        node_id, total = node["NodeID"], node["Resources"]
        held, free = held_by_node.get(node_id, {}), free_by_node.get(node_id, {})
        usable = {kind: min(total.get(kind, 0), free.get(kind, 0) + held.get(kind, 0)) for kind in ("CPU", "GPU")}
        if on_cpu and node_id == own_node():
            usable["CPU"] = min(usable["CPU"], physical_cores())
        nodes.append(usable)
    cores = sum(node["CPU"] for node in nodes) if on_cpu else None
    return ClusterCapacity((actor.spec, rollout.spec), tuple(nodes), cores)


async def capacity_or_none(pools: Sequence[Pool]) -> ClusterCapacity | None:
    """Return the capacity, or None with a warning if Ray does not report its resources."""
    try:
        return await in_thread(cluster_capacity, pools)
    except (RayError, LookupError) as error:
        log.warning(
            "no advice about the sizes of the pools, because Ray did not report its resources: %s: %s",
            type(error).__name__,
            error,
        )
        return None


def physical_cores() -> int:
    """Return the number of cores of this machine that this process may use. Hardware threads of one core count once."""
    return min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False) or psutil.cpu_count() or 1)


def _resources_held_by(pools: Sequence[Pool]) -> dict[str, dict[str, float]]:
    """Return node id -> resources that the pools have reserved there."""
    held: dict[str, dict[str, float]] = {}
    for group in {pool.group.id: pool.group for pool in pools}.values():
        table = placement_group_table(group)
        for bundle, node_id in table["bundles_to_node_id"].items():
            on_node = held.setdefault(node_id, {})
            for kind, amount in table["bundles"][bundle].items():
                on_node[kind] = on_node.get(kind, 0) + amount
    return held
