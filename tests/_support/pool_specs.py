"""Pool sizes from the default configuration."""

from __future__ import annotations

from recipe_gkd.config import load_config
from recipe_gkd.ray_cluster.pools import PoolSpec, pool_specs

SIZE_KEYS = dict(
    actor_nodes="trainer.nnodes",
    actor="trainer.n_gpus_per_node",
    rollout_nodes="rollout.nnodes",
    rollout="rollout.n_gpus_per_node",
)


def configured_specs(device: str = "cuda", *overrides: str, **sizes: int) -> tuple[PoolSpec, ...]:
    """Return the specs of both pools. ``sizes``: a key of :data:`SIZE_KEYS` -> its value."""
    size_overrides = [f"{SIZE_KEYS[name]}={n}" for name, n in sizes.items()]
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=x"]
    return pool_specs(load_config("on_policy_distill_trainer", [*needed, *size_overrides, *overrides]), device)
