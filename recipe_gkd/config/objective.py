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
    """Each part of the objective needs a coefficient, and answers to learn from."""
    gkd = config.gkd
    sampled, of_data = gkd.sft_share < 1, gkd.sft_share > 0 and gkd.sft_target == "data"
    has_distillation = sampled or not of_data
    if gkd.use_rl_loss and not sampled:
        yield "gkd.use_rl_loss=true needs sampled answers, and with gkd.sft_share=1 there are none; lower the share"
    if gkd.use_rl_loss and not gkd.rl_loss_coef:
        yield "gkd.use_rl_loss=true with gkd.rl_loss_coef=0 adds nothing; raise it, or set gkd.use_rl_loss=false"
    if of_data and not gkd.sft_loss_coef:
        yield (
            f"gkd.sft_share={gkd.sft_share:g} with gkd.sft_loss_coef=0: these prompts would be trained on nothing; "
            "raise the coefficient, or set gkd.sft_share=0"
        )
    if gkd.sft_share and not of_data and not gkd.distill_loss_coef:
        yield (
            f"gkd.sft_share={gkd.sft_share:g} gkd.sft_target=teacher with gkd.distill_loss_coef=0: these prompts would "
            "be trained on nothing; raise the coefficient, or set gkd.sft_share=0"
        )
    if not ((gkd.distill_loss_coef and has_distillation) or gkd.use_rl_loss or of_data):
        yield (
            f"the gradient is zero: gkd.distill_loss_coef={gkd.distill_loss_coef:g}, and neither a reward "
            "(gkd.use_rl_loss) nor given answers (gkd.sft_share); raise the coefficient, or add one of these"
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
    if gkd.baseline == "group" and kind != "k1":
        yield f"gkd.baseline=group has no effect on gkd.distill_loss_type={kind}, only on k1; set it to expected"
    if kind in SAMPLED and gkd.sft_share and gkd.sft_target == "teacher":
        yield (
            f"gkd.distill_loss_type={kind} with gkd.sft_target=teacher: given answers are not sampled from the "
            "student, so their tokens estimate nothing; set gkd.sft_target=data, or choose a divergence of the top-k"
        )
    drawn_otherwise = rollout.temperature != 1 or rollout.top_p < 1 or rollout.top_k > 0
    if drawn_otherwise and (kind in SAMPLED or gkd.use_rl_loss):
        what = f"gkd.distill_loss_type={kind}" if kind in SAMPLED else "gkd.use_rl_loss=true"
        yield (
            f"{what} with actor_rollout_ref.rollout.temperature={rollout.temperature:g}, top_p={rollout.top_p:g}, "
            f"top_k={rollout.top_k}: its gradient is right for answers drawn from the student itself; set them to 1, 1 "
            "and -1"
        )
