"""Conditions under which nothing reads a key. A field of the schema lists its own in the order of precedence.

Combinations that are certainly a mistake are refused in :mod:`~recipe_gkd.config.validate` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe_gkd.config.conditions import (
    failure_mode,
    has_loss_parameter,
    has_reward,
    needs_rewards,
    runs_validation,
    saves_checkpoints,
    uses_custom_loss,
    uses_sampled_token_loss,
    uses_teacher,
)
from recipe_gkd.config.prompt_settings import prompt_settings

if TYPE_CHECKING:
    from recipe_gkd.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class UnusedWhen:
    """Condition under which nothing reads a key.

    Attributes:
        condition: Function that returns True if nothing reads the key.
        because: Function that returns the value of the key that is the reason. The message shows both.
        enable: Value of this key with which the other one is read, as it is written in an override.
        remedy: What the user does for that. Empty: set the value.
    """

    condition: Callable[[Config], bool]
    because: Callable[[Config], object]
    enable: str
    remedy: str = ""


def needs(because: Callable[[Config], object], value: object, remedy: str = "") -> UnusedWhen:
    """Return the condition that a key has another value than ``value``."""
    enable = as_override_value(value)
    return UnusedWhen(condition=lambda config: because(config) != value, because=because, enable=enable, remedy=remedy)


def unused_with(because: Callable[[Config], object], value: object, enable: str) -> UnusedWhen:
    """Return the condition that a key has this value."""
    return UnusedWhen(condition=lambda config: because(config) == value, because=because, enable=enable)


def needs_parameter(name: str, loss: str) -> UnusedWhen:
    """Return the condition that the divergence has no parameter of this name, which ``loss`` has."""
    return UnusedWhen(
        condition=lambda config: not has_loss_parameter(config.gkd, name),
        because=lambda config: config.gkd.distill_loss_type,
        enable=loss,
    )


def as_override_value(value: object) -> str:
    """Return a value as it is written in an override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


NO_TEACHER = UnusedWhen(
    condition=lambda config: not uses_teacher(config.gkd),
    because=lambda config: config.gkd.enable_teacher,
    enable="true",
)
CUSTOM_LOSS = UnusedWhen(
    condition=lambda config: uses_custom_loss(config.gkd),
    because=lambda config: config.gkd.custom_loss.path,
    enable="null",
    remedy="set gkd.custom_loss={path: null, name: null}",
)
NO_POLICY_LOSS = needs(lambda config: config.gkd.use_rl_loss, True)
NO_REFERENCE_RESPONSES = unused_with(lambda config: config.gkd.sft_share, 0, "0.5")
NO_REWARD = UnusedWhen(
    condition=lambda config: not has_reward(config),
    because=lambda config: config.custom_reward_function.path,
    enable="reward.py",
)
NO_REWARDED_RESPONSE = UnusedWhen(
    condition=lambda config: has_reward(config) and not needs_rewards(config),
    because=lambda config: config.custom_reward_function.on_training,
    enable="true",
)
SEVERAL_REWARDS = needs(
    lambda config: config.custom_reward_function.functions, {}, "set it in custom_reward_function.functions"
)
NO_VALIDATION = UnusedWhen(
    condition=lambda config: not runs_validation(config),
    because=lambda config: config.trainer.test_freq,
    enable="10",
)
NO_CHECKPOINTS = UnusedWhen(
    condition=lambda config: not saves_checkpoints(config),
    because=lambda config: config.trainer.save_freq,
    enable="100",
)
NAMED_TEACHERS = needs(  # Hydra merges mappings, so that {} changes nothing
    lambda config: config.actor_rollout_ref.teacher.teachers, {}, "remove actor_rollout_ref.teacher.teachers"
)
NO_MEGATRON = needs(lambda config: config.actor_rollout_ref.actor.strategy, "megatron")
GREEDY = unused_with(lambda config: config.actor_rollout_ref.rollout.temperature, 0, "1")
GREEDY_VALIDATION = unused_with(lambda config: config.actor_rollout_ref.rollout.val_kwargs.temperature, 0, "1")
ON_CPU = unused_with(lambda config: config.trainer.device, "cpu", "cuda")
SHARED_DEVICES = needs(lambda config: config.actor_rollout_ref.hybrid_engine, False)
STUDENT_PROMPTS = UnusedWhen(
    condition=lambda config: not any(prompt_settings(config.actor_rollout_ref.teacher, config.data).values()),
    because=lambda config: config.data.teacher_prompt_key,
    enable="seen",
)
SAMPLED_TOKEN_LOSS = UnusedWhen(
    condition=lambda config: uses_sampled_token_loss(config.gkd),
    because=lambda config: config.gkd.distill_loss_type,
    enable="forward_kl",
)
TOP_K_LOSS = UnusedWhen(
    condition=lambda config: not uses_sampled_token_loss(config.gkd),
    because=lambda config: config.gkd.distill_loss_type,
    enable="k1",
)
NO_SOURCES = UnusedWhen(
    condition=lambda config: not has_reward(config) and not runs_validation(config),
    because=lambda config: config.custom_reward_function.path,
    enable="reward.py",
)
FAILURE_ENDS_RUN = UnusedWhen(
    condition=lambda config: has_reward(config) and failure_mode(config) == "fail",
    because=lambda config: config.custom_reward_function.on_failure,
    enable="skip",
)
NO_ADAPTERS = UnusedWhen(
    condition=lambda config: not config.actor_rollout_ref.actor.lora.rank,
    because=lambda config: config.actor_rollout_ref.actor.lora.rank,
    enable="16",
)
NO_TENSOR_PARALLELISM = UnusedWhen(
    condition=lambda config: (
        config.actor_rollout_ref.actor.megatron.sequence_parallel
        and config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1
    ),
    because=lambda config: config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size,
    enable="2",
)
