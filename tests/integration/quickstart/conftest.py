from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from recipe_gkd.quickstart.models import RECIPES, Recipe, Role
from recipe_gkd.quickstart.prepare import prepare
from tests._support.waiting import PATIENCE_S


@pytest.fixture(scope="session")
def instant_recipes() -> dict[Role, Recipe]:
    """Return the real recipes, but with one training step and any accuracy."""
    return {
        role: dataclasses.replace(recipe, band=(0.0, 1.0), steps_between_evaluations=1, max_steps=1)
        for role, recipe in RECIPES.items()
    }


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, instant_recipes: dict[Role, Recipe]) -> Path:
    """Return an output folder of `prepare` with untrained models."""
    out = tmp_path_factory.mktemp("quickstart")
    prepare(out, seed=3, recipes=instant_recipes, timeout_s=PATIENCE_S)
    return out
