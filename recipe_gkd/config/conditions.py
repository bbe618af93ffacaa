"""Conditions on the values of a configuration: what a run reads, computes and writes.

The schema imports this module, which imports the schema for its types only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe_gkd.config.schema import Config, GkdConfig
    from recipe_gkd.config.schema.reward import RewardFailureMode


def sends_adapters(config: Config) -> bool:
    """Return True if a weight sync transfers adapters only, which the engines add to the weights of the folder."""
    lora = config.actor_rollout_ref.actor.lora
    return bool(lora.rank) and lora.sync == "adapter"


def uses_teacher(gkd: GkdConfig) -> bool:
    """Return True if the responses of a run are scored by a teacher."""
    if gkd.enable_teacher is not None:
        return gkd.enable_teacher
    return gkd.distill_loss_coef > 0 and not (gkd.sft_share == 1 and gkd.sft_target == "data")


def trains_on_references(gkd: GkdConfig) -> bool:
    """Return True if some steps of a run train on the reference responses of the data."""
    return gkd.sft_share > 0 or gkd.warmup_steps > 0


def distills_references(gkd: GkdConfig) -> bool:
    """Return True if some steps train on reference responses with the distributions of a teacher."""
    return trains_on_references(gkd) and gkd.sft_target == "teacher"


def reference_setting(gkd: GkdConfig) -> tuple[str, str]:
    """Return the key with which a run trains on reference responses, and its assignment as text."""
    if gkd.sft_share:
        return "gkd.sft_share", f"gkd.sft_share={gkd.sft_share:g}"
    return "gkd.warmup_steps", f"gkd.warmup_steps={gkd.warmup_steps}"


def has_recorded_references(config: Config) -> bool:
    """Return True if a recording has the scores of the reference responses, and a teacher scores the others."""
    gkd, teacher = config.gkd, config.actor_rollout_ref.teacher
    is_beside_teacher = teacher.path is not None and teacher.backend != "recorded"
    return is_beside_teacher and distills_references(gkd) and uses_teacher(gkd)


def has_conversations(config: Config) -> bool:
    """Return True if responses have several turns, with an environment or tools."""
    return config.rollout.environment is not None or bool(config.rollout.tools)


def uses_custom_loss(gkd: GkdConfig) -> bool:
    """Return True if a user's function replaces ``gkd.distill_loss_type``."""
    return gkd.custom_loss.path is not None


def weights_column(gkd: GkdConfig) -> str | None:
    """Return the column with the weights of response tokens, None if the distillation loss has no such weights."""
    return None if uses_custom_loss(gkd) else gkd.position_weights_key


def has_position_weights(gkd: GkdConfig) -> bool:
    """Return True if response tokens have weights in the distillation loss, from a column or a function."""
    return not uses_custom_loss(gkd) and (gkd.position_weights is not None or gkd.position_weights_key is not None)


def uses_sampled_token_loss(gkd: GkdConfig) -> bool:
    """Return True if the distillation loss depends on the sampled token alone."""
    from recipe_gkd.losses.registry import sampled_token_loss_names

    return not uses_custom_loss(gkd) and gkd.distill_loss_type in sampled_token_loss_names()


def uses_group_baseline(gkd: GkdConfig) -> bool:
    """Return True if the distillation loss subtracts the mean over the other responses to the same prompt."""
    return not uses_custom_loss(gkd) and gkd.distill_loss_type == "k1" and gkd.baseline == "group"


def has_loss_parameter(gkd: GkdConfig, name: str) -> bool:
    """Return True if the divergence ``gkd.distill_loss_type`` has a parameter of this name."""
    from recipe_gkd.losses.registry import get_divergence

    return not uses_sampled_token_loss(gkd) and name in get_divergence(gkd.distill_loss_type).parameters


def has_reward(config: Config) -> bool:
    """Return True if the configuration has a reward function."""
    section = config.custom_reward_function
    return section.path is not None or bool(section.functions)


def max_sequences(config: Config) -> int:
    """Return the maximum number of sequences of ``data.max_response_length`` that a response is trained as."""
    is_divided = has_conversations(config) and config.rollout.history == "rewrite"
    return config.rollout.max_turns if is_divided else 1


def failure_mode(config: Config) -> RewardFailureMode:
    """Return ``custom_reward_function.on_failure``, or its default value for this configuration."""
    chosen = config.custom_reward_function.on_failure
    return chosen if chosen is not None else "fail" if config.gkd.use_rl_loss else "skip"


def saves_checkpoints(config: Config) -> bool:
    """Return True if the run saves checkpoints: at intervals, or of the best weights."""
    return config.trainer.save_freq > 0 or config.trainer.best_metric is not None


def runs_validation(config: Config) -> bool:
    """Return True if the run validates at least once."""
    return config.trainer.test_freq > 0 or config.trainer.val_before_train


def trains_on_rewards(config: Config) -> bool:
    """Return True if training responses get rewards, for a loss or for metrics."""
    return has_reward(config) and (config.gkd.use_rl_loss or config.custom_reward_function.on_training)


def needs_rewards(config: Config) -> bool:
    """Return True if any response gets a reward."""
    return trains_on_rewards(config) or (has_reward(config) and runs_validation(config))


def validates_kl(config: Config) -> bool:
    """Return True if validation reports KL divergences. By default it does if there is no reward function."""
    is_on = config.trainer.val_kl
    if is_on is None:
        is_on = not has_reward(config) and config.actor_rollout_ref.teacher.backend != "recorded"
    return is_on and uses_teacher(config.gkd) and runs_validation(config)
