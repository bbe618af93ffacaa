"""Last message of a run that was ended: the newest checkpoint, and a command that resumes from it."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from recipe_gkd.checkpoints.resume_hint import resume_hint
from recipe_gkd.checkpoints.run_lock import locked
from recipe_gkd.config.schema import TrainerConfig
from recipe_gkd.diagnostics.exit_messages import report_saved_stop, report_stop
from tests._support.base_config import base_config
from tests._support.checkpoint_files import write_checkpoints

ARGUMENTS = ["--config-name", "x", "data.train_files=[a b]", "trainer.resume_mode=disable"]


def trainer_of(folder: Path, mode: str = "auto") -> TrainerConfig:
    return base_config(f"trainer.default_local_dir={folder}", f"trainer.resume_mode={mode}").trainer


class TestResumeHint:
    @pytest.mark.parametrize("mode", ["auto", "disable"])
    def test_command_resumes_in_every_mode(self, tmp_path: Path, mode: str) -> None:
        write_checkpoints(tmp_path, 12)
        checkpoint, command = resume_hint(trainer_of(tmp_path, mode), ARGUMENTS).split("\n")
        assert checkpoint == f"the newest checkpoint is {tmp_path}/global_step_12"
        words = shlex.split(command.removeprefix("to resume from it: "))
        expected = ARGUMENTS if mode == "auto" else [*ARGUMENTS[:-1], "trainer.resume_mode=auto"]
        assert words == ["python", "-m", "recipe_gkd.main_gkd", *expected]

    @pytest.mark.parametrize("mode", ["disable", "resume_path"])
    def test_checkpoint_of_an_earlier_run_is_not_named(self, tmp_path: Path, mode: str) -> None:
        write_checkpoints(tmp_path, 12, 100)
        checkpoint = tmp_path / "global_step_12"
        trainer = replace(trainer_of(tmp_path, "disable"), resume_mode=mode)
        if mode == "resume_path":
            trainer = replace(trainer, resume_from_path=str(checkpoint))
        with locked(tmp_path):
            os.utime(tmp_path / "global_step_100" / "trainer.json", (0, 0))
            start = "the beginning" if mode == "disable" else str(checkpoint)
            expected = f"this run has saved no checkpoint, so that the same command starts from {start} again"
            assert resume_hint(trainer, ARGUMENTS) == expected
            write_checkpoints(tmp_path, 13)
            assert "the newest checkpoint is" in resume_hint(trainer, ARGUMENTS)

    def test_run_without_checkpoint_starts_again(self, tmp_path: Path) -> None:
        hint = resume_hint(trainer_of(tmp_path), ARGUMENTS)
        assert hint == f"{tmp_path} has no checkpoint, so that the same command starts from the beginning"

    def test_run_with_damaged_checkpoints_only_needs_a_new_run(self, tmp_path: Path) -> None:
        write_checkpoints(tmp_path, 12)
        (tmp_path / "global_step_12" / "trainer.json").unlink()
        hint = resume_hint(trainer_of(tmp_path), ARGUMENTS)
        assert hint.endswith("it has no trainer.json); start a new run with trainer.resume_mode=disable")


class TestExitMessages:
    def test_status_and_text_tell_both_ends_apart(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert [
            report_stop("terminated", 15, "hint"),
            report_stop("interrupted", 2),
            report_saved_stop("why", "h"),
        ] == [
            143,
            130,
            75,
        ]
        assert capsys.readouterr().err == "\nterminated; hint\n\ninterrupted\n\nended before the last step (why); h\n"
