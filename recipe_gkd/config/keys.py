"""Names of config keys for messages, derived from the schema: mypy and the import of a module find a renamed field.

``losses`` and ``runtime``, which may not import this package, write the names as text.
``tests/unit/config/test_key_names.py`` compares all texts with the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

from recipe_gkd.config.key_types import known_keys
from recipe_gkd.config.schema import Config


@cache
def _names() -> frozenset[str]:
    """Return the names of all keys and sections."""
    return frozenset(key.rsplit(".", n)[0] for key in known_keys() for n in range(key.count(".") + 1))


class _Name:
    """Stand-in for a configuration that records which field is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, field: str) -> _Name:
        name = f"{self._name}.{field}".lstrip(".")
        if name not in _names():
            raise AttributeError(f"the schema has no key {name}")
        return _Name(name)

    def __str__(self) -> str:
        return self._name


def key_name(read: Callable[[Config], object]) -> str:
    """Return the full name of the key or section that a function reads, such as ``lambda config: config.gkd.beta``.

    Raises:
        AttributeError: The schema has no such key.
    """
    return str(read(cast(Config, _Name(""))))


MODEL = key_name(lambda config: config.actor_rollout_ref.model)
MODEL_PATH = key_name(lambda config: config.actor_rollout_ref.model.path)
ACTOR = key_name(lambda config: config.actor_rollout_ref.actor)
STRATEGY = key_name(lambda config: config.actor_rollout_ref.actor.strategy)
MEGATRON = key_name(lambda config: config.actor_rollout_ref.actor.megatron)
FSDP = key_name(lambda config: config.actor_rollout_ref.actor.fsdp_config)
LORA = key_name(lambda config: config.actor_rollout_ref.actor.lora)
OPTIM = key_name(lambda config: config.actor_rollout_ref.actor.optim)
ROLLOUT = key_name(lambda config: config.actor_rollout_ref.rollout)
TEACHER = key_name(lambda config: config.actor_rollout_ref.teacher)
BACKEND = key_name(lambda config: config.actor_rollout_ref.teacher.backend)
HYBRID = key_name(lambda config: config.actor_rollout_ref.hybrid_engine)
REWARD = key_name(lambda config: config.custom_reward_function)
TRAIN_FILES = key_name(lambda config: config.data.train_files)
VAL_FILES = key_name(lambda config: config.data.val_files)
DTYPES = (f"{MEGATRON}.dtype", f"{FSDP}.dtype", f"{ROLLOUT}.dtype")
"""Data types of the student. ``auto`` becomes a type when the devices are known."""
ENV_VARS = key_name(lambda config: config.ray_init.env_vars)
TRACE_FILE = key_name(lambda config: config.trainer.trace_file)
POOL_KEYS = (key_name(lambda config: config.trainer.nnodes), key_name(lambda config: config.trainer.n_gpus_per_node))
