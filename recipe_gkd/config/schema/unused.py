"""Conditions under which nothing reads a key. A field of the schema lists its own in the order of precedence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe_gkd.config.conditions import (
    distills_references,
    failure_mode,
    has_conversations,
    has_loss_parameter,
    has_reward,
    needs_rewards,
    runs_validation,
    saves_checkpoints,
    trains_on_references,
    uses_sampled_token_loss,
    uses_teacher,
)
from recipe_gkd.config.prompt_settings import prompt_settings

if TYPE_CHECKING:
    from recipe_gkd.config.schema import Config


@dataclass(frozen=True)
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
    return UnusedWhen(lambda config: because(config) != value, because, as_override_value(value), remedy)


def unused_with(because: Callable[[Config], object], value: object, enable: str) -> UnusedWhen:
    """Return the condition that a key has this value."""
    return UnusedWhen(lambda config: because(config) == value, because, enable)


def with_backends(*backends: str, enable: str) -> UnusedWhen:
    """Return the condition that the teacher's backend is one of these. A class of the user may read every key."""
    return UnusedWhen(
        lambda config: config.actor_rollout_ref.teacher.backend in backends,
        lambda config: config.actor_rollout_ref.teacher.backend,
        enable,
    )


def needs_parameter(name: str, loss: str) -> UnusedWhen:
    """Return the condition that the divergence has no parameter of this name, which ``loss`` has."""
    return UnusedWhen(
        lambda config: not has_loss_parameter(config.gkd, name), lambda config: config.gkd.distill_loss_type, loss
    )


def as_override_value(value: object) -> str:
    """Return a value as it is written in an override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


NO_TEACHER = UnusedWhen(lambda config: not uses_teacher(config.gkd), lambda config: config.gkd.enable_teacher, "true")
CUSTOM_LOSS = needs(lambda config: config.gkd.custom_loss.path, None, "set gkd.custom_loss={path: null, name: null}")
NO_POLICY_LOSS = needs(lambda config: config.gkd.use_rl_loss, True)
NO_REFERENCE_RESPONSES = UnusedWhen(
    lambda config: not trains_on_references(config.gkd),
    lambda config: config.gkd.sft_share,
    "0.5",
    "set gkd.sft_share=0.5 or gkd.warmup_steps=100",
)
ALL_REFERENCES = unused_with(lambda config: config.gkd.sft_share, 1, "0")
NO_REWARD = UnusedWhen(
    lambda config: not has_reward(config), lambda config: config.custom_reward_function.path, "reward.py"
)
NO_REWARDED_RESPONSE = UnusedWhen(
    lambda config: has_reward(config) and not needs_rewards(config),
    lambda config: config.custom_reward_function.on_training,
    "true",
)
SEVERAL_REWARDS = needs(
    lambda config: config.custom_reward_function.functions, {}, "set it in custom_reward_function.functions"
)
NO_VALIDATION = UnusedWhen(lambda config: not runs_validation(config), lambda config: config.trainer.test_freq, "10")
NO_CHECKPOINTS = UnusedWhen(
    lambda config: not saves_checkpoints(config), lambda config: config.trainer.save_freq, "100"
)
NAMED_TEACHERS = needs(  # Hydra merges mappings, so that {} changes nothing
    lambda config: config.actor_rollout_ref.teacher.teachers, {}, "remove actor_rollout_ref.teacher.teachers"
)
NO_MEGATRON = needs(lambda config: config.actor_rollout_ref.actor.strategy, "megatron")
NO_FSDP = needs(lambda config: config.actor_rollout_ref.actor.strategy, "fsdp")
NO_SERVICE = with_backends("hf", "http", "recorded", enable="zmq")
NO_SCORING_WORKERS = with_backends("hf", "recorded", enable="zmq")
NO_HTTP_SERVER = with_backends("hf", "zmq", "recorded", enable="http")
NO_SUPPORT_IDS = with_backends("http", "recorded", enable="zmq")
TEACHER_SUPPORT = unused_with(lambda config: config.actor_rollout_ref.teacher.support, "teacher", "student")
ONLY_STUDENT_SUPPORT = UnusedWhen(
    lambda config: (
        config.actor_rollout_ref.teacher.support == "student"
        and config.actor_rollout_ref.teacher.backend in ("hf", "zmq")
        and not distills_references(config.gkd)
    ),
    lambda config: config.actor_rollout_ref.teacher.support,
    "union",
)
RECORDED = with_backends("recorded", enable="zmq")
NO_CACHE = unused_with(lambda config: config.actor_rollout_ref.teacher.cache_dir, None, "teacher_cache")
GREEDY = unused_with(lambda config: config.actor_rollout_ref.rollout.temperature, 0, "1")
GREEDY_VALIDATION = unused_with(lambda config: config.actor_rollout_ref.rollout.val_kwargs.temperature, 0, "1")
ON_CPU = unused_with(lambda config: config.trainer.device, "cpu", "cuda")
SHARED_DEVICES = needs(lambda config: config.actor_rollout_ref.hybrid_engine, False)
STUDENT_PROMPTS = UnusedWhen(
    lambda config: not any(prompt_settings(config.actor_rollout_ref.teacher, config.data).values()),
    lambda config: config.data.teacher_prompt_key,
    "seen",
)
SAMPLED_TOKEN_LOSS = UnusedWhen(
    lambda config: uses_sampled_token_loss(config.gkd), lambda config: config.gkd.distill_loss_type, "forward_kl"
)
TOP_K_LOSS = UnusedWhen(
    lambda config: not uses_sampled_token_loss(config.gkd), lambda config: config.gkd.distill_loss_type, "k1"
)
NO_SOURCES = UnusedWhen(
    lambda config: not has_reward(config) and not runs_validation(config),
    lambda config: config.custom_reward_function.path,
    "reward.py",
)
FAILURE_ENDS_RUN = UnusedWhen(
    lambda config: has_reward(config) and failure_mode(config) == "fail",
    lambda config: config.custom_reward_function.on_failure,
    "skip",
)
NO_CONVERSATIONS = UnusedWhen(
    lambda config: not has_conversations(config),
    lambda config: config.rollout.environment,
    "environment.py:Shop",
    "set rollout.tools or rollout.environment",
)
NO_ENVIRONMENT = UnusedWhen(
    lambda config: config.rollout.environment is None,
    lambda config: config.rollout.environment,
    "environment.py:Shop",
)
FAILED_CONVERSATION_ENDS_RUN = unused_with(lambda config: config.rollout.on_environment_failure, "fail", "truncate")
NO_ADAPTERS = UnusedWhen(
    lambda config: not config.actor_rollout_ref.actor.lora.rank,
    lambda config: config.actor_rollout_ref.actor.lora.rank,
    "16",
)
NO_TENSOR_PARALLELISM = UnusedWhen(
    lambda config: (
        config.actor_rollout_ref.actor.megatron.sequence_parallel
        and config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1
    ),
    lambda config: config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size,
    "2",
)
