"""Checks of the objective: combinations of keys that have no gradient, or whose gradient has another meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipe_gkd.config.conditions import (
    distills_references,
    has_conversations,
    has_reward,
    reference_setting,
    trains_on_references,
    uses_custom_loss,
    uses_group_baseline,
    uses_sampled_token_loss,
    uses_teacher,
)
from recipe_gkd.config.schema import Config, GkdConfig
from recipe_gkd.errors import ConfigError


def objective_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each combination that cannot work, with the change that repairs it."""
    yield from _without_gradient(config)
    yield from _reward(config)
    yield from _sampled_tokens(config)
    yield from _custom_loss(config)
    yield from _position_weights(config)


def max_scored_tokens(config: Config) -> int:
    """Return the number of tokens of the longest response that is sent to a teacher.

    In a conversation ``gkd.max_loss_position`` limits the sampled tokens only, and any number of others precedes them.
    """
    longest, limit = config.data.max_response_length, config.gkd.max_loss_position
    return longest if limit is None or has_conversations(config) else min(longest, limit)


def loss_name(gkd: GkdConfig | Mapping[str, Any]) -> str | None:
    """Return the name of the distillation loss: of the user's function, or ``gkd.distill_loss_type``.

    Args:
        gkd: Section ``gkd`` of a configuration, or of a stored one, which may lack keys.

    Returns:
        The name, None if a stored configuration has none.
    """
    if isinstance(gkd, Mapping):
        custom, kind = gkd.get("custom_loss"), gkd.get("distill_loss_type")
        return (custom.get("name") if isinstance(custom, Mapping) else None) or kind
    return gkd.custom_loss.name or gkd.distill_loss_type


def check_custom_loss(config: Config) -> None:
    """Import the user's loss function and call it on example inputs, if the configuration has one.

    Raises:
        ConfigError: Only one of path and name is set, the file or the function does not exist, or its outputs are
            invalid.
    """
    path, name = config.gkd.custom_loss.path, config.gkd.custom_loss.name
    if path is None and name is None:
        return
    if path is None or name is None:
        raise ConfigError(
            f"gkd.custom_loss.path={path} with gkd.custom_loss.name={name}: a custom loss needs both",
            remedy="set the other key, or set both to null",
            keys=("gkd.custom_loss.path", "gkd.custom_loss.name"),
        )
    from recipe_gkd.losses.custom import load_custom_loss

    load_custom_loss(path, name)


def _without_gradient(config: Config) -> Iterator[ConfigError]:
    gkd = config.gkd
    has_sampled, is_sft = gkd.sft_share < 1, gkd.sft_target == "data"
    has_sft = gkd.sft_share > 0 and is_sft
    has_distillation = uses_teacher(gkd) and (has_sampled or not is_sft)
    if gkd.use_rl_loss and not has_sampled:
        yield ConfigError(
            "gkd.use_rl_loss=true needs sampled responses, but gkd.sft_share=1 replaces all of them",
            remedy="lower gkd.sft_share",
            keys=("gkd.use_rl_loss", "gkd.sft_share"),
        )
    if gkd.use_rl_loss and not gkd.rl_loss_coef and not uses_custom_loss(gkd):  # a custom loss can use the advantages
        yield ConfigError(
            "gkd.use_rl_loss=true with gkd.rl_loss_coef=0 has no effect",
            remedy="raise the coefficient, or set gkd.use_rl_loss=false",
            keys=("gkd.use_rl_loss", "gkd.rl_loss_coef"),
        )
    source, shown = reference_setting(gkd)
    if trains_on_references(gkd) and is_sft and not gkd.sft_loss_coef:
        yield ConfigError(
            f"{shown} with gkd.sft_loss_coef=0: the reference responses have no loss",
            remedy=f"raise the coefficient, or set {source}=0",
            keys=(source, "gkd.sft_loss_coef"),
        )
    if distills_references(gkd) and not (gkd.distill_loss_coef and uses_teacher(gkd)):
        yield ConfigError(
            f"{shown} gkd.sft_target=teacher with {_without_distillation(gkd)}: the reference responses have no loss",
            remedy=f"change this key, or set {source}=0",
            keys=(source, "gkd.sft_target", _teacher_switch(gkd)),
        )
    if not ((gkd.distill_loss_coef and has_distillation) or (gkd.use_rl_loss and gkd.rl_loss_coef) or has_sft):
        yield ConfigError(
            f"the gradient is zero: {_without_distillation(gkd)}, without a policy loss (gkd.use_rl_loss) and without "
            f"reference responses (gkd.sft_share){' after gkd.warmup_steps' if gkd.warmup_steps else ''}",
            remedy="change this key, or add one of these",
            keys=(_teacher_switch(gkd), "gkd.use_rl_loss", "gkd.sft_share"),
        )
    if uses_custom_loss(gkd) and not uses_teacher(gkd):
        yield ConfigError(
            f"gkd.custom_loss.path={gkd.custom_loss.path} with {_without_distillation(gkd)}: a custom loss is computed "
            "from the teacher's scores",
            remedy="change this key, or set gkd.custom_loss.path=null gkd.custom_loss.name=null",
            keys=("gkd.custom_loss.path", _teacher_switch(gkd)),
        )


def _without_distillation(gkd: GkdConfig) -> str:
    """Return the override that switches the distillation loss off."""
    value = "false" if gkd.enable_teacher is False else f"{gkd.distill_loss_coef:g}"
    return f"{_teacher_switch(gkd)}={value}"


def _teacher_switch(gkd: GkdConfig) -> str:
    """Return the key that switches the distillation loss off."""
    return "gkd.enable_teacher" if gkd.enable_teacher is False else "gkd.distill_loss_coef"


def _reward(config: Config) -> Iterator[ConfigError]:
    gkd, n = config.gkd, config.actor_rollout_ref.rollout.n
    if gkd.use_rl_loss and not has_reward(config):
        yield ConfigError(
            "gkd.use_rl_loss=true needs a reward",
            remedy=(
                "set custom_reward_function.path and custom_reward_function.name to a "
                "Python function of (prompt, response, ground_truth, extra), or set gkd.use_rl_loss=false"
            ),
            keys=("gkd.use_rl_loss", "custom_reward_function.path"),
        )
    grouped = (("gkd.use_rl_loss", "true", gkd.use_rl_loss), ("gkd.baseline", "group", uses_group_baseline(gkd)))
    for key, value, is_used in grouped:
        if is_used and n == 1:
            yield ConfigError(
                f"{key}={value} compares the responses to the same prompt, but actor_rollout_ref.rollout.n=1 samples "
                "one",
                remedy="set actor_rollout_ref.rollout.n to 4 or more",
                keys=(key, "actor_rollout_ref.rollout.n"),
            )


def _sampled_tokens(config: Config) -> Iterator[ConfigError]:
    gkd, rollout = config.gkd, config.actor_rollout_ref.rollout
    kind, is_sampled = f"gkd.distill_loss_type={gkd.distill_loss_type}", uses_sampled_token_loss(gkd)
    if is_sampled and gkd.distill_temperature != 1:
        yield ConfigError(
            f"{kind} with gkd.distill_temperature={gkd.distill_temperature:g}: tokens sampled at temperature 1 do not "
            "estimate the divergence at another temperature",
            remedy="set it to 1, or choose a divergence of the top-k",
            keys=("gkd.distill_loss_type", "gkd.distill_temperature"),
        )
    if gkd.baseline == "group" and not uses_group_baseline(gkd):
        kind_in_use = "a custom loss" if uses_custom_loss(gkd) else kind
        yield ConfigError(
            f"gkd.baseline=group has no effect on {kind_in_use}, only on k1",
            remedy="set it to expected",
            keys=("gkd.baseline", "gkd.custom_loss.path" if uses_custom_loss(gkd) else "gkd.distill_loss_type"),
        )
    if is_sampled and distills_references(gkd):
        yield ConfigError(
            f"{kind} with gkd.sft_target=teacher: reference responses are not sampled from the student, so their "
            "tokens do not estimate its divergence",
            remedy="set gkd.sft_target=data, or choose a divergence of the top-k",
            keys=("gkd.distill_loss_type", "gkd.sft_target"),
        )
    is_other_distribution = rollout.temperature != 1 or rollout.top_p < 1 or rollout.top_k > 0
    if is_other_distribution and (is_sampled or gkd.use_rl_loss):
        yield ConfigError(
            f"{kind if is_sampled else 'gkd.use_rl_loss=true'} with actor_rollout_ref.rollout.temperature="
            f"{rollout.temperature:g}, top_p={rollout.top_p:g}, top_k={rollout.top_k}: its gradient is correct for "
            "responses sampled from the student's own distribution",
            remedy="set them to 1, 1 and -1",
            keys=(
                "gkd.distill_loss_type" if is_sampled else "gkd.use_rl_loss",
                *(f"actor_rollout_ref.rollout.{name}" for name in ("temperature", "top_p", "top_k")),
            ),
        )


def _custom_loss(config: Config) -> Iterator[ConfigError]:
    try:
        check_custom_loss(config)
    except ConfigError as error:
        yield error


def _position_weights(config: Config) -> Iterator[ConfigError]:
    if config.gkd.position_weights is None:
        return
    from recipe_gkd.losses.position_weights import load_position_weights

    try:
        load_position_weights(config.gkd.position_weights)
    except ConfigError as error:
        yield error
