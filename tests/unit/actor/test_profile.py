"""Profiles of updates: chosen steps and ranks only, and a full disk does not end the run."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from recipe_gkd.actor.profile import profiled
from recipe_gkd.config.schema import ProfileConfig


def multiply(folder: Path, *, step: int, rank: int) -> None:
    with profiled(ProfileConfig(steps=[2, 3], ranks=[1]), folder, step=step, rank=rank):
        torch.ones(8, 8) @ torch.ones(8, 8)


class TestProfiled:
    def test_chosen_step_and_rank_writes_a_trace(self, tmp_path: Path) -> None:
        for step, rank in ((1, 1), (2, 0), (2, 1), (4, 1)):
            multiply(tmp_path, step=step, rank=rank)
        assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2_rank_1.json.gz"]
        with gzip.open(tmp_path / "profile" / "step_2_rank_1.json.gz") as file:
            events = json.load(file)["traceEvents"]
        assert any(event.get("name") == "aten::matmul" for event in events)

    def test_unwritable_folder_is_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "profile").write_text("a file")
        with caplog.at_level(logging.WARNING):
            multiply(tmp_path, step=2, rank=1)
        assert "step_2_rank_1.json.gz could not be written" in caplog.text

    def test_error_of_the_update_is_raised(self, tmp_path: Path) -> None:
        config = ProfileConfig(steps=[1], ranks=[0])
        with pytest.raises(ArithmeticError), profiled(config, tmp_path, step=1, rank=0):
            raise ArithmeticError
        assert not (tmp_path / "profile").exists()
