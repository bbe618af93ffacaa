"""Pool sizes from the default configuration."""

from __future__ import annotations

from recipe_gkd.ray_cluster.pools import PoolSpec, pool_specs
from tests._support.base_config import base_config

SIZE_KEYS = dict(
    actor_nodes="trainer.nnodes",
    actor="trainer.n_gpus_per_node",
    rollout_nodes="rollout.nnodes",
    rollout="rollout.n_gpus_per_node",
)


def configured_specs(device: str = "cuda", *overrides: str, **sizes: int) -> tuple[PoolSpec, ...]:
    """Return the specs of both pools. ``sizes``: a key of :data:`SIZE_KEYS` -> its value."""
    size_overrides = [f"{SIZE_KEYS[name]}={n}" for name, n in sizes.items()]
    return pool_specs(base_config(*size_overrides, *overrides), device)
