"""Resource pools: what the actor and the rollout workers may use, as Ray placement groups.

A pool is ``nnodes`` bundles of ``n_per_node`` slots. A slot is a GPU with a CPU, or with ``trainer.device=cpu`` just a
CPU, so that the same numbers lay out the same processes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipe_gkd.config import Config
from recipe_gkd.errors import ResourceError


@dataclass(frozen=True)
class PoolSpec:
    """``nnodes x n_per_node`` slots of one ``device`` (`cpu` or `cuda`)."""

    name: str
    nnodes: int
    n_per_node: int
    device: str
    sizes: str
    """The config keys that set the size, for messages."""

    @property
    def what(self) -> str:
        return "CPU slots" if self.device == "cpu" else "GPUs"

    @property
    def slot(self) -> dict[str, float]:
        return {"CPU": 1} if self.device == "cpu" else {"CPU": 1, "GPU": 1}

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [{what: n * self.n_per_node for what, n in self.slot.items()} for _ in range(self.nnodes)]


@dataclass(frozen=True)
class Pool:
    """A pool that the cluster has granted."""

    spec: PoolSpec
    group: PlacementGroup

    def spawn(
        self, worker: type, arguments: list[dict[str, Any]], *, slots: int = 1, env: dict[str, str] | None = None
    ) -> list[Any]:
        """Start ``worker(**own)`` for each of ``arguments``, each in ``slots`` slots, node after node; by rank."""
        per_node = self.spec.n_per_node // slots
        gpus = slots * self.spec.slot.get("GPU", 0)
        handles = []
        for rank, own in enumerate(arguments):
            strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank // per_node)
            remote: Any = ray.remote(
                num_cpus=slots,
                num_gpus=gpus,
                scheduling_strategy=strategy,
                max_restarts=0,
                runtime_env={"env_vars": env or {}},
            )(worker)
            handles.append(remote.remote(**own))
        return handles

    def release(self) -> None:
        remove_placement_group(self.group)


def pool_specs(config: Config, device: str) -> tuple[PoolSpec, PoolSpec]:
    """The actor pool and the rollout pool."""
    trainer, rollout = config.trainer, config.rollout
    return (
        PoolSpec("actor", trainer.nnodes, trainer.n_gpus_per_node, device, "trainer.nnodes x trainer.n_gpus_per_node"),
        PoolSpec(
            "rollout", rollout.nnodes, rollout.n_gpus_per_node, device, "rollout.nnodes x rollout.n_gpus_per_node"
        ),
    )


async def create_pools(specs: tuple[PoolSpec, ...], *, timeout_s: float) -> tuple[Pool, ...]:
    """Reserve all pools, or raise :class:`ResourceError` at once, saying what was asked and what the cluster has."""
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if not fits(specs, nodes):
        raise ResourceError(f"not enough {specs[0].what} for the two pools.\n{_asked_and_there(specs, nodes)}")
    pools = tuple(
        Pool(spec, placement_group(spec.bundles, strategy="STRICT_SPREAD" if spec.nnodes > 1 else "STRICT_PACK"))
        for spec in specs
    )
    try:
        async with asyncio.timeout(timeout_s):
            for pool in pools:
                await pool.group.ready()
    except BaseException as error:
        for pool in pools:
            pool.release()
        if isinstance(error, TimeoutError):
            raise ResourceError(
                f"the pools were not granted within {timeout_s:g} s: the cluster is large enough, but others use it "
                f"now; see `ray status`.\n{_asked_and_there(specs, nodes)}"
            ) from error
        raise
    return pools


def fits(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> bool:
    """Whether every pool finds its bundles, each bundle of a pool on a node of its own, largest bundles first."""
    free = [Counter(node) for node in nodes]
    for spec in sorted(specs, key=lambda spec: -spec.n_per_node):
        used: set[int] = set()
        for bundle in spec.bundles:
            roomy = [
                i for i, node in enumerate(free) if i not in used and all(node[what] >= n for what, n in bundle.items())
            ]
            if not roomy:
                return False
            used.add(best := min(roomy, key=lambda i: free[i]["GPU"] or free[i]["CPU"]))
            free[best].subtract(bundle)
    return True


def check_devices(reports: dict[str, dict[str, Any]]) -> None:
    """Raise :class:`ResourceError` if two workers got one GPU. ``reports``: worker's label -> its setup report."""
    owners: dict[tuple[str, str], str] = {}
    for label, report in reports.items():
        for device in report.get("devices", ()):
            if device != "cpu" and (other := owners.setdefault((report["node"], device), label)) != label:
                raise ResourceError(
                    f"{label} and {other} both got {device} on node {report['node']}; "
                    "look for CUDA_VISIBLE_DEVICES set by hand, or for a second job on these GPUs"
                )


def _asked_and_there(specs: tuple[PoolSpec, ...], nodes: list[dict[str, float]]) -> str:
    def amount(resources: dict[str, float]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))

    asked = "\n".join(
        f"  {spec.name} pool: {spec.nnodes} x {spec.n_per_node} {spec.what}   ({spec.sizes})" for spec in specs
    )
    there = "\n".join(f"  node {i}: {amount(node)}" for i, node in enumerate(nodes))
    remedy = "ask for less, or start Ray with more"
    if specs[0].device == "cpu":
        remedy += " (ray_init.num_cpus=N lets N one-thread workers share this machine's cores)"
    return f"asked:\n{asked}\nthe cluster has:\n{there}\n{remedy}"
