"""Learning rate as a function of the step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.actor.learning_rate import learning_rate
from recipe_gkd.config.schema import OptimConfig
from tests._support.tiny_models import make_config

BASE = make_config(Path("none")).actor_rollout_ref.actor.optim


def rates(**changes: Any) -> list[float]:
    """Return the rates of steps 0 to 11 of a schedule of 10 steps from 1.0 to 0.2."""
    optim: OptimConfig = dataclasses.replace(BASE, lr=1.0, min_lr=0.2, **changes)
    return [learning_rate(step, 10, optim) for step in range(12)]


class TestLearningRate:
    def test_learning_rate_in_warmup_rises_from_above_zero_to_peak(self) -> None:
        assert rates(lr_warmup_steps=4, lr_decay_style="constant") == [0.25, 0.5, 0.75] + [1.0] * 9

    def test_learning_rate_with_warmup_ratio_uses_total_steps(self) -> None:
        assert rates(lr_warmup_steps=-1, lr_warmup_steps_ratio=0.2, lr_decay_style="constant")[:3] == [0.5, 1.0, 1.0]

    @pytest.mark.parametrize("style", ["linear", "cosine"])
    def test_learning_rate_in_decay_falls_to_min_lr_and_stays(self, style: str) -> None:
        values = rates(lr_warmup_steps=2, lr_decay_style=style)
        assert values[1] == values[2] == 1.0
        assert values[6] == pytest.approx(0.6)  # half of the decay
        assert values[2:11] == sorted(values[2:11], reverse=True)
        assert values[10] == values[11] == pytest.approx(0.2)
