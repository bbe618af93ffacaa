"""Checkpoint folders: a folder that is there is whole, and a position never means another place in the data."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.checkpoints import Best, CheckpointWriter, Progress, find_checkpoint, read_best, read_progress
from recipe_gkd.config import Config, load_config
from recipe_gkd.errors import CheckpointError

PROGRESS = Progress(step=4, prompts_trained=256, n_prompts=1000, data_seed=1, shuffle=True)


def config(root: Path, *overrides: str) -> Config:
    return load_config(
        "on_policy_distill_trainer",
        ["data.train_files=x", "actor_rollout_ref.model.path=x", f"trainer.default_local_dir={root}", *overrides],
    )


def write(root: Path, progress: Progress = PROGRESS) -> None:
    writer = CheckpointWriter(root, progress)
    (writer.folder / "weights").write_text(str(progress.step))
    writer.complete()


def test_the_latest_complete_checkpoint_is_found_and_read(tmp_path: Path) -> None:
    assert find_checkpoint(config(tmp_path)) is None
    write(tmp_path)
    write(tmp_path, replace(PROGRESS, step=8, prompts_trained=512))
    folder = find_checkpoint(config(tmp_path))
    assert folder == tmp_path / "global_step_8"
    assert read_progress(folder, expected=PROGRESS).prompts_trained == 512
    assert find_checkpoint(config(tmp_path, "trainer.resume_mode=disable")) is None


def test_a_checkpoint_from_before_samples_could_be_skipped_is_read(tmp_path: Path) -> None:
    write(tmp_path, replace(PROGRESS, skipped_samples=3))
    file = tmp_path / "global_step_4" / "trainer.json"
    assert read_progress(file.parent, expected=PROGRESS).skipped_samples == 3
    values = json.loads(file.read_text())
    del values["skipped_samples"]
    file.write_text(json.dumps(values))
    assert read_progress(file.parent, expected=PROGRESS) == PROGRESS


def test_a_write_that_is_given_up_leaves_the_last_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    writer = CheckpointWriter(tmp_path, replace(PROGRESS, step=5))
    (writer.folder / "weights").write_text("half")
    assert find_checkpoint(config(tmp_path)) == tmp_path / "global_step_4"
    writer.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_4", "latest_checkpointed_iteration.txt"]


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path)
    assert (tmp_path / "global_step_4" / "weights").read_text() == "4"


def test_an_incomplete_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "global_step_3").mkdir()
    chosen = config(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_3")
    with pytest.raises(CheckpointError, match="global_step_3 is no complete checkpoint"):
        find_checkpoint(chosen)


def test_the_best_is_a_link_that_follows_its_record_even_after_a_crash(tmp_path: Path) -> None:
    for step, value in ((2, 0.1), (4, 0.3), (6, None)):
        best = None if value is None else Best("val/data/score", value, step)
        CheckpointWriter(tmp_path, replace(PROGRESS, step=step), best).complete()
    assert (tmp_path / "best").readlink() == Path("global_step_4")
    assert find_checkpoint(config(tmp_path)) == tmp_path / "global_step_6"
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("global_step_2")  # the crash came between record and link
    assert read_best(tmp_path, "val/data/score", until=6) == Best("val/data/score", 0.3, 4)
    assert (tmp_path / "best").readlink() == Path("global_step_4")


def test_of_the_best_count_those_that_are_there_by_this_metric_up_to_this_step(tmp_path: Path) -> None:
    assert read_best(tmp_path, "val/data/score", until=9) is None and not list(tmp_path.iterdir())
    for step in (2, 4, 6, 8):
        CheckpointWriter(tmp_path, replace(PROGRESS, step=step), Best("a" if step < 8 else "b", step, step)).complete()
    assert read_best(tmp_path, None, until=8) == Best("b", 8, 8)
    assert read_best(tmp_path, "a", until=8) == Best("a", 6, 6)
    shutil.rmtree(tmp_path / "global_step_6")
    assert read_best(tmp_path, "a", until=6) == Best("a", 4, 4)
    assert read_best(tmp_path, "a", until=3) == Best("a", 2, 2)
    assert read_best(tmp_path, "b", until=3) is None and not (tmp_path / "best").is_symlink()
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read"):
        read_best(tmp_path, "a", until=3)


@pytest.mark.parametrize("change", [{"n_prompts": 999}, {"data_seed": 2}, {"shuffle": False}])
def test_other_data_or_another_order_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read_progress(tmp_path / "global_step_4", expected=replace(PROGRESS, **change))
