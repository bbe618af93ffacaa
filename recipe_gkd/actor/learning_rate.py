"""The learning-rate schedule."""

from __future__ import annotations

import math

from recipe_gkd.config.schema import OptimConfig


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of a step: linear warm-up to ``lr``, then decay to ``min_lr``.

    The first of W warm-up steps has the rate ``lr / W``, not 0. The decay ends at ``total_steps``; the rate is constant
    after it.

    Args:
        step: Optimizer step, counted from 0.
        total_steps: Step at which the decay ends.
        optim: Parameters of the schedule.
    """
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = round(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    match optim.lr_decay_style:
        case "constant":
            return optim.lr
        case "linear":
            factor = 1 - progress
        case "cosine":
            factor = (1 + math.cos(math.pi * progress)) / 2
    return optim.min_lr + factor * (optim.lr - optim.min_lr)
