"""Warnings about keys that the user set and that nothing reads in a configuration.

Combinations that are certainly a mistake are refused in :mod:`~recipe_gkd.config.validate` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recipe_gkd.config.actor_layout import as_override_value
from recipe_gkd.config.objective import uses_custom_loss, uses_sampled_token_loss, uses_teacher
from recipe_gkd.config.reward_functions import failure_mode, has_reward
from recipe_gkd.config.schema import Config
from recipe_gkd.config.teachers import prompt_settings
from recipe_gkd.config.validate import needs_rewards, runs_validation, saves_checkpoints

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TEACHER, HYBRID = "actor_rollout_ref.teacher", "actor_rollout_ref.hybrid_engine"
STRATEGY, MEGATRON, LORA = f"{ACTOR}.strategy", f"{ACTOR}.megatron", f"{ACTOR}.lora"
OPTIM, SAMPLING = f"{ACTOR}.optim", f"{ROLLOUT}.val_kwargs"
REWARD = "custom_reward_function"


@dataclass(frozen=True, kw_only=True)
class UnusedKeys:
    """Keys that have no effect under a condition.

    Attributes:
        keys: Their names.
        is_unused: Condition under which nothing reads them.
        because: Key whose value is the reason. The message shows it.
        enable: Override after which they are read.
        remedy: What the user does for that. Empty: set ``enable``.
    """

    keys: tuple[str, ...]
    is_unused: Callable[[Config], bool]
    because: str
    enable: str
    remedy: str = ""


def _unread_by_loss(parameter: str) -> Callable[[Config], bool]:
    """Return the condition that the divergence has no parameter of this name."""

    def is_unused(config: Config) -> bool:
        from recipe_gkd.losses.registry import get_divergence

        gkd = config.gkd
        return uses_sampled_token_loss(gkd) or parameter not in get_divergence(gkd.distill_loss_type).parameters

    return is_unused


_TEACHER_KEYS = (
    "server_ip",
    "server_port",
    "prompt_template",
    "vocabulary",
    "n_server_workers",
    "num_microbatches",
    "top_k",
    "wire_dtype",
    "auth_dir",
    "scoring_workers_per_node",
    "max_rows_gb",
    "on_failure",
    "sleep_between_batches",
)

UNUSED_KEYS = (
    UnusedKeys(
        keys=(
            *(f"{TEACHER}.{name}" for name in _TEACHER_KEYS),
            *(f"gkd.{name}" for name in ("distill_loss_type", "distill_temperature", "tail", "max_loss_position")),
            "data.teacher_prompt_key",
            "trainer.val_kl",
        ),
        is_unused=lambda config: not uses_teacher(config.gkd),
        because="gkd.enable_teacher",
        enable="gkd.enable_teacher=true",
    ),
    UnusedKeys(
        keys=(f"{TEACHER}.allow_prompt_mismatch",),
        is_unused=lambda config: not any(prompt_settings(config.actor_rollout_ref.teacher, config.data).values()),
        because="data.teacher_prompt_key",
        enable="data.teacher_prompt_key=seen",
    ),
    UnusedKeys(
        keys=(f"{ACTOR}.micro_batch_size",),
        is_unused=lambda config: config.actor_rollout_ref.actor.use_dynamic_bsz,
        because=f"{ACTOR}.use_dynamic_bsz",
        enable=f"{ACTOR}.use_dynamic_bsz=false",
    ),
    UnusedKeys(
        keys=(f"{ACTOR}.max_token_len",),
        is_unused=lambda config: not config.actor_rollout_ref.actor.use_dynamic_bsz,
        because=f"{ACTOR}.use_dynamic_bsz",
        enable=f"{ACTOR}.use_dynamic_bsz=true",
    ),
    UnusedKeys(
        keys=tuple(f"{MEGATRON}.{name}" for name in ("use_distributed_optimizer", "dtype", "transformer_impl")),
        is_unused=lambda config: config.actor_rollout_ref.actor.strategy == "fsdp",
        because=STRATEGY,
        enable=f"{STRATEGY}=megatron",
    ),
    UnusedKeys(
        keys=(f"{MEGATRON}.sequence_parallel",),
        is_unused=lambda config: config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1,
        because=f"{MEGATRON}.tensor_model_parallel_size",
        enable=f"{MEGATRON}.tensor_model_parallel_size=2",
    ),
    UnusedKeys(
        keys=(f"{ACTOR}.fsdp_config.dtype",),
        is_unused=lambda config: config.actor_rollout_ref.actor.strategy == "megatron",
        because=STRATEGY,
        enable=f"{STRATEGY}=fsdp",
    ),
    UnusedKeys(
        keys=(f"{LORA}.alpha",),
        is_unused=lambda config: not config.actor_rollout_ref.actor.lora.rank,
        because=f"{LORA}.rank",
        enable=f"{LORA}.rank=16",
    ),
    UnusedKeys(
        keys=(f"{OPTIM}.lr_warmup_steps_ratio",),
        is_unused=lambda config: config.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
        because=f"{OPTIM}.lr_warmup_steps",
        enable=f"{OPTIM}.lr_warmup_steps=-1",
    ),
    UnusedKeys(
        keys=(f"{OPTIM}.min_lr",),
        is_unused=lambda config: config.actor_rollout_ref.actor.optim.lr_decay_style == "constant",
        because=f"{OPTIM}.lr_decay_style",
        enable=f"{OPTIM}.lr_decay_style=cosine",
    ),
    UnusedKeys(
        keys=(
            f"{ACTOR}.checkpoint.save_contents",
            f"{ACTOR}.checkpoint.async_save",
            "trainer.max_actor_ckpt_to_keep",
            "trainer.save_failures_allowed",
        ),
        is_unused=lambda config: not saves_checkpoints(config),
        because="trainer.save_freq",
        enable="trainer.save_freq=100",
    ),
    UnusedKeys(
        keys=(f"{ACTOR}.checkpoint.load_contents",),
        is_unused=lambda config: config.trainer.resume_mode == "disable",
        because="trainer.resume_mode",
        enable="trainer.resume_mode=auto",
    ),
    UnusedKeys(
        keys=(f"{TEACHER}.server_ip", f"{TEACHER}.server_port"),
        is_unused=lambda config: bool(config.actor_rollout_ref.teacher.teachers),
        because=f"{TEACHER}.teachers",
        enable=f"{TEACHER}.teachers={{}}",
        remedy=f"remove {TEACHER}.teachers",  # Hydra merges mappings, so that {} changes nothing
    ),
    UnusedKeys(
        keys=(f"{TEACHER}.max_wait_s",),
        is_unused=lambda config: config.actor_rollout_ref.teacher.on_failure != "wait",
        because=f"{TEACHER}.on_failure",
        enable=f"{TEACHER}.on_failure=wait",
    ),
    UnusedKeys(
        keys=(f"{TEACHER}.max_skipped_samples",),
        is_unused=lambda config: config.actor_rollout_ref.teacher.on_failure != "skip_samples",
        because=f"{TEACHER}.on_failure",
        enable=f"{TEACHER}.on_failure=skip_samples",
    ),
    UnusedKeys(
        keys=tuple(
            f"gkd.{name}"
            for name in ("distill_loss_type", "beta", "rkl_ratio", "skew_alpha", "tail", "importance", "baseline")
        ),
        is_unused=lambda config: uses_custom_loss(config.gkd),
        because="gkd.custom_loss.path",
        enable="gkd.custom_loss={path: null, name: null}",
    ),
    *(
        UnusedKeys(
            keys=(f"gkd.{parameter}",),
            is_unused=_unread_by_loss(parameter),
            because="gkd.distill_loss_type",
            enable=f"gkd.distill_loss_type={loss}",
        )
        for parameter, loss in (("beta", "jsd"), ("rkl_ratio", "kl_rkl"), ("skew_alpha", "skewed_forward_kl"))
    ),
    UnusedKeys(
        keys=("gkd.tail",),
        is_unused=lambda config: uses_sampled_token_loss(config.gkd),
        because="gkd.distill_loss_type",
        enable="gkd.distill_loss_type=forward_kl",
    ),
    UnusedKeys(
        keys=("gkd.importance",),
        is_unused=lambda config: not uses_sampled_token_loss(config.gkd),
        because="gkd.distill_loss_type",
        enable="gkd.distill_loss_type=k1",
    ),
    UnusedKeys(
        keys=("gkd.baseline",),
        is_unused=lambda config: config.gkd.distill_loss_type != "k1",
        because="gkd.distill_loss_type",
        enable="gkd.distill_loss_type=k1",
    ),
    UnusedKeys(
        keys=tuple(
            f"gkd.{name}"
            for name in ("rl_loss_coef", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "norm_adv_by_std")
        ),
        is_unused=lambda config: not config.gkd.use_rl_loss,
        because="gkd.use_rl_loss",
        enable="gkd.use_rl_loss=true",
    ),
    UnusedKeys(
        keys=("gkd.sft_target", "gkd.sft_loss_coef", "data.response_key"),
        is_unused=lambda config: config.gkd.sft_share == 0,
        because="gkd.sft_share",
        enable="gkd.sft_share=0.5",
    ),
    UnusedKeys(
        keys=("gkd.sft_loss_coef",),
        is_unused=lambda config: config.gkd.sft_target == "teacher",
        because="gkd.sft_target",
        enable="gkd.sft_target=data",
    ),
    UnusedKeys(
        keys=("data.truncation",),
        is_unused=lambda config: config.data.filter_overlong_prompts,
        because="data.filter_overlong_prompts",
        enable="data.filter_overlong_prompts=false",
    ),
    UnusedKeys(
        keys=(
            "data.val_files",
            "data.val_max_samples",
            "trainer.log_val_generations",
            "trainer.val_kl",
            *(f"{SAMPLING}.{name}" for name in ("n", "temperature", "top_p", "top_k")),
        ),
        is_unused=lambda config: not runs_validation(config),
        because="trainer.test_freq",
        enable="trainer.test_freq=10",
    ),
    UnusedKeys(
        keys=(f"{SAMPLING}.top_p", f"{SAMPLING}.top_k"),
        is_unused=lambda config: config.actor_rollout_ref.rollout.val_kwargs.temperature == 0,
        because=f"{SAMPLING}.temperature",
        enable=f"{SAMPLING}.temperature=1",
    ),
    UnusedKeys(
        keys=(f"{ROLLOUT}.mismatch_patience",),
        is_unused=lambda config: config.actor_rollout_ref.rollout.mismatch_bound is None,
        because=f"{ROLLOUT}.mismatch_bound",
        enable=f"{ROLLOUT}.mismatch_bound=auto",
    ),
    UnusedKeys(
        keys=(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"),
        is_unused=lambda config: config.actor_rollout_ref.rollout.temperature == 0,
        because=f"{ROLLOUT}.temperature",
        enable=f"{ROLLOUT}.temperature=1",
    ),
    UnusedKeys(
        keys=tuple(
            f"{REWARD}.{name}"
            for name in (
                "name",
                "kwargs",
                "skip_special_tokens",
                "on_training",
                "timeout_s",
                "num_workers",
                "max_concurrency",
                "on_failure",
            )
        ),
        is_unused=lambda config: not has_reward(config),
        because=f"{REWARD}.path",
        enable=f"{REWARD}.path=reward.py",
    ),
    UnusedKeys(
        keys=(f"{REWARD}.failure_value",),
        is_unused=lambda config: config.custom_reward_function.on_failure != "value",
        because=f"{REWARD}.on_failure",
        enable=f"{REWARD}.on_failure=value",
    ),
    UnusedKeys(
        keys=(f"{REWARD}.max_failures",),
        is_unused=lambda config: has_reward(config) and failure_mode(config) == "fail",
        because=f"{REWARD}.on_failure",
        enable=f"{REWARD}.on_failure=skip",
    ),
    UnusedKeys(
        keys=(f"{REWARD}.name", f"{REWARD}.kwargs"),
        is_unused=lambda config: bool(config.custom_reward_function.functions),
        because=f"{REWARD}.functions",
        enable=f"{REWARD}.functions={{}}",
        remedy=f"set it in {REWARD}.functions",
    ),
    *(
        UnusedKeys(
            keys=(f"{REWARD}.{name}",),
            is_unused=lambda config: has_reward(config) and not needs_rewards(config),
            because=f"{REWARD}.on_training",
            enable=f"{REWARD}.on_training=true",
        )
        for name in ("path", "functions")
    ),
    UnusedKeys(
        keys=(f"{ROLLOUT}.gpu_memory_utilization",),
        is_unused=lambda config: config.actor_rollout_ref.rollout.kv_cache_memory_megabytes is not None,
        because=f"{ROLLOUT}.kv_cache_memory_megabytes",
        enable=f"{ROLLOUT}.kv_cache_memory_megabytes=null",
    ),
    UnusedKeys(
        keys=tuple(f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "enforce_eager", "async_scheduling")),
        is_unused=lambda config: config.trainer.device == "cpu",
        because="trainer.device",
        enable="trainer.device=cuda",
    ),
    UnusedKeys(
        keys=(f"{ROLLOUT}.sleep_level",),
        is_unused=lambda config: not config.actor_rollout_ref.hybrid_engine,
        because=HYBRID,
        enable=f"{HYBRID}=true",
    ),
    UnusedKeys(
        keys=("rollout.nnodes", "rollout.n_gpus_per_node"),
        is_unused=lambda config: config.actor_rollout_ref.hybrid_engine,
        because=HYBRID,
        enable=f"{HYBRID}=false",
    ),
    UnusedKeys(
        keys=("data.ground_truth_key",),
        is_unused=lambda config: not has_reward(config),
        because=f"{REWARD}.path",
        enable=f"{REWARD}.path=reward.py",
    ),
    UnusedKeys(
        keys=("data.data_source_key",),
        is_unused=lambda config: not has_reward(config) and not runs_validation(config),
        because=f"{REWARD}.path",
        enable=f"{REWARD}.path=reward.py",
    ),
    UnusedKeys(
        keys=("trainer.profile.ranks",),
        is_unused=lambda config: not config.trainer.profile.steps,
        because="trainer.profile.steps",
        enable="trainer.profile.steps=[3]",
    ),
    UnusedKeys(
        keys=("trainer.total_epochs",),
        is_unused=lambda config: config.trainer.total_training_steps is not None,
        because="trainer.total_training_steps",
        enable="trainer.total_training_steps=null",
    ),
)
"""Conditions in the order of precedence: a key is reported once."""

_OFF = ((f"{MEGATRON}.sequence_parallel", False),)
"""Values with which a key that is listed above asks for nothing."""


def unused_key_warnings(config: Config, set_keys: Collection[str]) -> list[str]:
    """Return a warning for each key that the user set and that nothing reads.

    Args:
        config: A validated configuration.
        set_keys: Keys that the user set.
    """
    warnings: dict[str, str] = {}
    for rule in UNUSED_KEYS:
        names = [name for name in rule.keys if name in set_keys and name not in warnings and _has_value(config, name)]
        if names and rule.is_unused(config):
            because = f"{rule.because}={_shown(value_of(config, rule.because))}"
            for name in names:
                warnings[name] = (
                    f"{name}={_shown(value_of(config, name))} has no effect with {because}; "
                    f"{rule.remedy or f'set {rule.enable}'}, or leave {name} out"
                )
    return list(warnings.values())


def value_of(config: Config, name: str) -> Any:
    """Return the value of the key ``name``."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _has_value(config: Config, name: str) -> bool:
    """Return False for null and empty lists, which select nothing, and for a layout that is off."""
    return value_of(config, name) not in (None, [], {}) and (name, value_of(config, name)) not in _OFF


def _shown(value: Any) -> str:
    """Return a value as it is written in an override; of a mapping, the names."""
    return f"{{{', '.join(value)}}}" if isinstance(value, Mapping) else as_override_value(value)
