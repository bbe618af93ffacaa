"""Advice after an update that is not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipe_gkd.actor.update import not_finite_advice
from recipe_gkd.config.schema import CustomLossConfig
from tests._support.tiny_models import make_config


def test_not_finite_advice_names_custom_loss() -> None:
    gkd = make_config(Path("unused")).gkd
    custom = replace(gkd, custom_loss=CustomLossConfig(path="/losses.py", name="my_loss"))
    assert "custom loss" not in not_finite_advice(gkd)
    assert "check the gradient of the custom loss my_loss of /losses.py, and the teacher's" in not_finite_advice(custom)
