from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe_gkd.addition.task import make_splits
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.errors import DeadlineError, ModelError
from recipe_gkd.quickstart.models import FAMILY_RECIPES, RECIPES, SELF_RECIPES, Recipe, Role, greedy_accuracy
from recipe_gkd.quickstart.prepare import RECORD, SIZES, prepare
from tests._support.errors import raises
from tests._support.waiting import PATIENCE_S


def _times(out: Path) -> dict[str, int]:
    return {name: (out / name / RECORD).stat().st_mtime_ns for name in ("data", "teacher", "student")}


def test_prepare_writes_complete_folders(prepared: Path) -> None:
    assert sorted(path.name for path in prepared.iterdir()) == ["data", "student", "teacher"]
    for name, size in (("train", "n_train"), ("held_out", "n_held_out"), ("dev", "n_dev")):
        assert pq.read_metadata(prepared / "data" / f"{name}.parquet").num_rows == SIZES[size]
    for role in RECIPES:
        assert json.loads((prepared / role / RECORD).read_text())["steps"] == 1
        assert (prepared / role / "generation_config.json").is_file()


def test_prepare_again_skips_complete_folders(prepared: Path, instant_recipes: dict[Role, Recipe]) -> None:
    before = _times(prepared)
    prepare(prepared, seed=3, recipes=instant_recipes, timeout_s=0)
    assert _times(prepared) == before


@pytest.mark.slow
def test_prepare_again_replaces_only_an_incomplete_folder(prepared: Path, instant_recipes: dict[Role, Recipe]) -> None:
    before = _times(prepared)
    (prepared / "student" / RECORD).write_text('{"key": "cut sho')
    (prepared / "student" / "model.safetensors").write_bytes(b"half")
    (prepared / "student.partial").mkdir()
    (prepared / "student.partial" / "left_over").touch()
    prepare(prepared, seed=3, recipes=instant_recipes, timeout_s=PATIENCE_S)
    after = _times(prepared)
    assert after.pop("student") > before.pop("student")
    assert after == before
    assert (prepared / "student" / "model.safetensors").stat().st_size > 100_000
    assert not (prepared / "student.partial").exists()
    assert not (prepared / "student" / "left_over").exists()


@pytest.mark.slow
def test_prepare_model_outside_its_band_raises_without_its_folder(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPES["student"], steps_between_evaluations=1, max_steps=1)
    others = set(multiprocessing.active_children())
    with raises(ModelError, path=tmp_path / "student") as caught:
        prepare(tmp_path, recipes={"student": recipe}, timeout_s=PATIENCE_S)
    assert isinstance(caught.value.__cause__, ModelError)
    assert not (tmp_path / "student").exists()
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize(
    "role", [*RECIPES, *SELF_RECIPES, *(pytest.param(role, marks=pytest.mark.slow) for role in FAMILY_RECIPES)]
)
def test_packaged_weights_have_the_recorded_accuracy(role: Role, tmp_path: Path) -> None:
    """No model can be trained within 0 s."""
    recipe = (RECIPES | SELF_RECIPES | FAMILY_RECIPES)[role]
    records = prepare(tmp_path, recipes={role: recipe}, timeout_s=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / role)
    assert model.num_parameters() == records[role]["parameters"]
    torch.set_num_threads(1)
    dev = make_splits(0, **SIZES).dev
    low, high = recipe.band
    assert low <= records[role]["accuracy"] <= high
    assert greedy_accuracy(model, build_tokenizer(), dev) == pytest.approx(records[role]["accuracy"], abs=0.02)


def test_prepare_fresh_trains_although_there_are_packaged_weights(tmp_path: Path) -> None:
    with raises(DeadlineError, silent=("student",), waited_s=0.1):
        prepare(tmp_path, fresh=True, recipes={"student": RECIPES["student"]}, timeout_s=0.1)


def test_prepare_missed_deadline_names_the_models_and_ends_their_processes(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    with raises(DeadlineError, silent=("teacher", "student"), waited_s=0.1):
        prepare(tmp_path, seed=1, timeout_s=0.1)
    assert set(multiprocessing.active_children()) <= others
    assert [path.name for path in tmp_path.iterdir() if path.name in RECIPES] == []
