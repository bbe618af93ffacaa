"""A valid configuration for tests that need no data, model or teacher."""

from __future__ import annotations

from recipe_gkd.config import Config, load_config
from recipe_gkd.config.data_types import with_data_types

CONFIG_NAME = "on_policy_distill_trainer"
# Keys without a default. Nothing opens these paths when a configuration is loaded.
REQUIRED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=student")


def base_config(*overrides: str) -> Config:
    """Return the default configuration with ``overrides`` of the form ``key=value``."""
    return load_config(CONFIG_NAME, [*REQUIRED, *overrides])


def gpu_config(*overrides: str) -> Config:
    """Return the configuration of a run on GPUs, as its workers get it: with a data type in each place of ``auto``."""
    return with_data_types(base_config(*overrides), "cuda")
