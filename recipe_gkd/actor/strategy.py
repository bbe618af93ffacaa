"""Choice of the training backend, ``actor_rollout_ref.actor.strategy``: its model and its limits.

A backend is imported only when it is chosen. The driver imports this module without torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from recipe_gkd.config.schema import Config

if TYPE_CHECKING:
    from recipe_gkd.actor.backend import Backend
    from recipe_gkd.actor.ranks import RankSpec
    from recipe_gkd.actor.student_dims import StudentDims


def build_backend(config: Config, spec: RankSpec, *, is_overwritten: bool = False) -> Backend:
    """Join the process groups, build the model, load its weights and create the optimizer. Collective.

    Args:
        config: Configuration of the run. ``actor_rollout_ref.actor.strategy`` selects the backend.
        spec: This process.
        is_overwritten: True if a checkpoint is loaded next. Work on the weights of the model folder is then omitted.

    Raises:
        ModelError: The model folder cannot be read or is not supported.
        ConfigError: The settings do not fit the model or the number of ranks.
        DeadlineError: A rank did not reach the rendezvous within ``actor_rollout_ref.nccl_timeout``.
    """
    if config.actor_rollout_ref.actor.strategy == "fsdp":
        from recipe_gkd.actor.fsdp.backend import FsdpBackend

        return FsdpBackend(config, spec)
    from recipe_gkd.actor.library_imports import hidden_module, uncompiled
    from recipe_gkd.actor.megatron.transformer_impl import impl_setting, resolve_transformer_impl

    # Before Megatron is imported, because a defective Transformer Engine would make its import fail.
    resolve_transformer_impl(impl_setting(config.actor_rollout_ref.actor), spec.device)
    # Megatron imports wandb if it is installed, which takes seconds and leaves temporary folders behind.
    # A CPU worker would not use its compiled functions: see `install` in megatron/patches.py.
    with hidden_module("wandb"), uncompiled() if spec.device == "cpu" else nullcontext():
        from recipe_gkd.actor.megatron.backend import MegatronBackend

    return MegatronBackend(config, spec, is_overwritten=is_overwritten)


def read_student_dims(path: str | Path, config: Config) -> StudentDims:
    """Return the dimensions of the student for the training backend of a run.

    Args:
        path: Model folder with a ``config.json``.
        config: Configuration of the run. ``actor_rollout_ref.actor.strategy`` selects the supported models.

    Raises:
        ModelError: The folder has no readable ``config.json``, or the backend does not support the model.
    """
    trust_remote_code = config.actor_rollout_ref.model.trust_remote_code
    if config.actor_rollout_ref.actor.strategy == "fsdp":
        from recipe_gkd.actor.fsdp.model_dims import read_causal_lm_dims

        return read_causal_lm_dims(path, trust_remote_code=trust_remote_code)
    from recipe_gkd.actor.megatron.families.reading import read_model_dims

    return read_model_dims(path, trust_remote_code=trust_remote_code)
