"""Objectives that cannot teach: no gradient, one that knows nothing of the teacher, or one of another function."""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.schema import Config

SAMPLED = ("k1", "k2", "k3")
"""Losses that see the sampled token alone."""


def objective_complaints(config: Config) -> Iterator[str]:
    """Each says what is wrong with it, and what to change."""
    yield from _nothing_to_learn(config)
    yield from _reward(config)
    yield from _sampled_tokens(config)


def _nothing_to_learn(config: Config) -> Iterator[str]:
    gkd = config.gkd
    coefficients = {
        "gkd.distill_loss_coef": gkd.distill_loss_coef,
        "gkd.rl_loss_coef": gkd.rl_loss_coef if gkd.use_rl_loss else 0,
        "gkd.sft_loss_coef": gkd.sft_loss_coef if gkd.sft_share and gkd.sft_target == "data" else 0,
    }
    if not any(coefficients.values()):
        yield (
            "the gradient is zero: gkd.distill_loss_coef=0, and neither a policy loss (gkd.use_rl_loss, "
            "gkd.rl_loss_coef) nor given answers (gkd.sft_share with gkd.sft_target=data, gkd.sft_loss_coef) have a "
            "coefficient above 0; raise one of them"
        )


def _reward(config: Config) -> Iterator[str]:
    gkd, n = config.gkd, config.actor_rollout_ref.rollout.n
    if gkd.use_rl_loss and config.custom_reward_function.path is None:
        yield (
            "gkd.use_rl_loss=true needs a reward: set custom_reward_function.path (and name) to a Python function "
            "(prompt, answer, ground_truth, extra) -> float, or gkd.use_rl_loss=false"
        )
    by_group = gkd.distill_loss_type == "k1" and gkd.baseline == "group"
    for wanted, what in ((gkd.use_rl_loss, "gkd.use_rl_loss=true"), (by_group, "gkd.baseline=group")):
        if wanted and n == 1:
            yield (
                f"{what} compares the answers to the same prompt, and actor_rollout_ref.rollout.n=1 asks for one; set "
                "actor_rollout_ref.rollout.n to 4 or more"
            )


def _sampled_tokens(config: Config) -> Iterator[str]:
    gkd, rollout = config.gkd, config.actor_rollout_ref.rollout
    kind = gkd.distill_loss_type
    if kind in SAMPLED and gkd.distill_temperature != 1:
        yield (
            f"gkd.distill_loss_type={kind} with gkd.distill_temperature={gkd.distill_temperature:g}: an estimate from "
            "tokens sampled at temperature 1 belongs to no other; set it to 1, or choose a divergence of the top-k"
        )
    if kind in SAMPLED and gkd.sft_share and gkd.sft_target == "teacher":
        yield (
            f"gkd.distill_loss_type={kind} with gkd.sft_target=teacher: given answers are not sampled from the "
            "student, so their tokens estimate nothing; set gkd.sft_target=data, or choose a divergence of the top-k"
        )
    drawn_otherwise = rollout.temperature != 1 or rollout.top_p < 1 or rollout.top_k != -1
    if drawn_otherwise and (kind in SAMPLED or gkd.use_rl_loss):
        what = f"gkd.distill_loss_type={kind}" if kind in SAMPLED else "gkd.use_rl_loss=true"
        yield (
            f"{what} with actor_rollout_ref.rollout.temperature={rollout.temperature:g}, top_p={rollout.top_p:g}, "
            f"top_k={rollout.top_k}: its gradient is right for answers drawn from the student itself; set them to 1, 1 "
            "and -1"
        )
