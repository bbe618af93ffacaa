"""Choice of the newest complete checkpoint, which is the same for a resumed run and for all commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipe_gkd.checkpoints.folders import LATEST, write_latest
from recipe_gkd.checkpoints.newest import find_checkpoint, newest_complete
from recipe_gkd.checkpoints.resume import resume_points
from recipe_gkd.checkpoints.resume_hint import resume_hint
from recipe_gkd.commands.export.source import find_source
from recipe_gkd.commands.model_folder import model_folder
from recipe_gkd.commands.report.run_files import read_run
from recipe_gkd.commands.report.settings import checkpoints_section
from recipe_gkd.errors import CheckpointError
from tests._support.base_config import base_config
from tests._support.checkpoint_files import PROGRESS, write_checkpoints
from tests._support.errors import raises
from tests.unit.commands.test_export_source import make_checkpoint, make_run


class TestFindCheckpoint:
    def test_run_gives_its_latest_checkpoint(self, tmp_path: Path) -> None:
        for step in (4, 8, 12):
            make_checkpoint(tmp_path, step)
        assert find_checkpoint(tmp_path).name == "global_step_12"
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("8\n")
        assert find_checkpoint(tmp_path).name == "global_step_8"
        assert find_checkpoint(tmp_path / "global_step_4").name == "global_step_4"

    def test_folder_without_checkpoint_is_refused(self, tmp_path: Path) -> None:
        with raises(CheckpointError, path=tmp_path, tried=()):
            find_checkpoint(tmp_path)

    @pytest.mark.parametrize("name", ["trainer.json", "actor/metadata.json"])
    def test_incomplete_checkpoint_names_the_missing_file(self, name: str, tmp_path: Path) -> None:
        folder = make_checkpoint(tmp_path)
        (folder / name).unlink()
        with raises(CheckpointError, path=folder / name):
            find_checkpoint(folder)

    def test_run_without_complete_checkpoint_lists_the_reasons(self, tmp_path: Path) -> None:
        folders = [make_checkpoint(tmp_path, step) for step in (4, 8)]
        for folder in folders:
            (folder / "trainer.json").unlink()
        with raises(CheckpointError, path=tmp_path, tried=(folders[1], folders[0])):
            find_checkpoint(tmp_path)


def exported(run: Path) -> Path:
    return find_source(run).checkpoint


def evaluated(run: Path) -> Path:
    return model_folder(run).parent


def resumed(run: Path) -> Path:
    return resume_points(base_config(f"trainer.default_local_dir={run}"), PROGRESS)[0].folder


def hinted(run: Path) -> Path:
    text = resume_hint(base_config(f"trainer.default_local_dir={run}").trainer, [])
    return Path(text.partition("the newest checkpoint is ")[2].partition("\n")[0])


def reported(run: Path) -> Path:
    (run / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    read = read_run(run)
    assert f"{run}/global_step_{read.latest} OUT" in checkpoints_section(read)
    return run / f"global_step_{read.latest}"


CHOOSERS = [exported, evaluated, resumed, hinted, reported]


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize(
    ("latest", "damaged", "expected"),
    [
        (None, [], 12),
        (None, [12], 8),
        ("x\n", [12], 8),
        ("8\n", [], 8),
        ("8\n", [8], 4),
        ("12\n", [12, 8], 4),
        ("10\n", [], 8),
    ],
)
def test_all_choose_the_same_complete_checkpoint(
    choose: Callable[[Path], Path], latest: str | None, damaged: list[int], expected: int, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    write_checkpoints(run, 4, 8, 12)
    for step in (4, 8, 12):
        model = run / f"global_step_{step}" / "huggingface"
        model.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer_config.json"):
            (model / name).write_text("{}")
    (run / LATEST).unlink()
    if latest is not None:
        (run / LATEST).write_text(latest)
    for step in damaged:
        (run / f"global_step_{step}" / "trainer.json").unlink()
    assert choose(run) == run / f"global_step_{expected}"


def test_line_names_the_choice_and_its_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (4, 8):
        make_checkpoint(tmp_path, step)
    (tmp_path / "global_step_8" / "trainer.json").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_4"
    [line] = caplog.messages
    assert line == (
        f"using {tmp_path}/global_step_4, the newest complete checkpoint: {LATEST} is missing; global_step_8 is not "
        "complete: it has no trainer.json"
    )
    caplog.clear()
    write_latest(tmp_path, 4)
    assert newest_complete(tmp_path).reasons == () and find_checkpoint(tmp_path).name == "global_step_4"
    assert not caplog.messages
