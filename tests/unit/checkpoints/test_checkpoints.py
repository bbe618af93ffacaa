"""Checkpoint folders: a folder with a final name is complete, whatever happens while it is written or replaced."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.checkpoints import folders
from recipe_gkd.checkpoints.folders import damage, final_folder, read_latest, recover, steps_of
from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.checkpoints.store import CheckpointWriter, forget_best, keep_best, read_best, remove_old
from recipe_gkd.errors import CheckpointError

PROGRESS = Progress(step=4, prompts_trained=256, n_prompts=1000, data_seed=1, shuffle=True)
ACTOR_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "shutil.rmtree")


def begin(root: Path, step: int = 4, content: str = "", best: Best | None = None) -> CheckpointWriter:
    """A checkpoint of which the actors have written everything."""
    writer = CheckpointWriter(root, replace(PROGRESS, step=step), best)
    (writer.folder / "actor").mkdir()
    (writer.folder / "actor" / "metadata.json").write_text("{}")
    (writer.folder / "actor" / "weights").write_text(content or str(step))
    return writer


def write(root: Path, *steps: int, best: Best | None = None) -> None:
    for step in steps or (4,):
        begin(root, step, best=best).complete()


def weights(root: Path, step: int) -> str:
    return (final_folder(root, step) / "actor" / "weights").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_write_that_is_given_up_leaves_the_last_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    writer = begin(tmp_path, 5)
    assert read_latest(tmp_path) == 4
    writer.discard()
    assert names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"]


def test_a_folder_that_the_actors_did_not_complete_is_refused_and_removed(tmp_path: Path) -> None:
    write(tmp_path)
    for content in (None, ""):  # the actor's last file is missing, or empty
        writer = begin(tmp_path, 5)
        file = writer.folder / "actor" / "metadata.json"
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(
            CheckpointError, match=r"step 5 is incomplete: the actors have not written .*metadata\.json"
        ):
            writer.complete()
        assert names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"] and read_latest(tmp_path) == 4


def test_what_is_written_into_a_discarded_folder_is_removed_in_the_end(tmp_path: Path) -> None:
    """Actors may go on writing: into open files, and into a folder that they make anew."""
    writer = begin(tmp_path)
    with (writer.folder / "actor" / "weights").open("a") as file:
        writer.discard()
        file.write("more")
    assert names(tmp_path) == []
    (writer.folder / "actor").mkdir(parents=True)
    (writer.folder / "actor" / "late").write_text("x")
    recover(tmp_path)
    assert names(tmp_path) == []


# ---- replacing a step


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a kill leaves, for which nothing need reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def exits_at(event_number: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a fork that ends, as if killed, before its ``event_number``-th file operation. Was it killed?"""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    left = event_number

    def count(event: str, _: Any) -> None:
        nonlocal left
        if event in ACTOR_EVENTS:
            left -= 1
            if left < 0:
                os._exit(1)

    sys.addaudithook(count)
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("latest", [4, 8], ids=["the latest", "one before the latest"])
def test_a_kill_at_any_operation_of_a_replacement_leaves_a_complete_checkpoint(
    tmp_path: Path, latest: int, quick_disk: None
) -> None:
    for number in range(200):
        root = tmp_path / str(number)
        root.mkdir()
        write(root, *sorted({4, latest}))

        def replace_it(root: Path = root) -> None:
            begin(root, content="new", best=Best("m", 1.0, 4)).complete()

        killed = exits_at(number, replace_it)
        recover(root)
        assert damage(final_folder(root, 4)) is None and weights(root, 4) in ("4", "new")
        pointed = read_latest(root)
        assert pointed is not None and damage(final_folder(root, pointed)) is None
        best = read_best(root, "m", until=9)
        assert best is None or (root / "best").resolve() == root / "global_step_4"
        assert not [name for name in names(root) if name.startswith((".writing", ".replaced", ".removing"))]
        if not killed:
            assert weights(root, 4) == "new" and pointed == 4 and number > 15
            return
    pytest.fail("the replacement did not end")


def test_a_kill_at_any_operation_of_the_recovery_does_no_harm(tmp_path: Path, quick_disk: None) -> None:
    for number in range(200):
        root = tmp_path / str(number)
        root.mkdir()
        write(root, 4)
        begin(root, 8)  # incomplete
        new = begin(root, content="new")
        new._mark_as_written()
        final_folder(root, 4).rename(root / ".replaced_global_step_4")
        killed = exits_at(number, lambda root=root: recover(root))  # type: ignore[misc]
        recover(root)
        assert weights(root, 4) == "new" and names(root) == ["global_step_4", "latest_checkpointed_iteration.txt"]
        if not killed:
            assert number > 5
            return


def test_a_complete_folder_that_cannot_be_renamed_stays_and_gets_its_name_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing") and target == final_folder(tmp_path, 4):
            raise OSError(39, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    writer = begin(tmp_path, content="new")
    with pytest.raises(CheckpointError, match=r"global_step_4 cannot be written: .*not empty"):
        writer.complete()
    writer.discard()
    assert weights(tmp_path, 4) == "4" and read_latest(tmp_path) == 4
    assert damage(folders.writing_folder(tmp_path, 4)) is None
    shutil.rmtree(final_folder(tmp_path, 4))
    recover(tmp_path)  # which cannot rename it either
    assert damage(folders.writing_folder(tmp_path, 4)) is None
    monkeypatch.undo()
    recover(tmp_path)
    assert weights(tmp_path, 4) == "new"


def test_an_old_folder_that_cannot_be_deleted_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of NFS, where an open file stays as .nfsXXXX."""
    write(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    begin(tmp_path, content="new").complete()
    assert weights(tmp_path, 4) == "new" and read_latest(tmp_path) == 4 and steps_of(tmp_path) == [4]


def test_content_is_flushed_before_it_gets_a_name_and_the_name_before_the_pointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    rename, move = Path.rename, Path.replace
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(f"{self.name} -> {to.name}"), rename(self, to)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append(f"{self.name} -> {to.name}"), move(self, to)))
    writer = begin(tmp_path)
    done.clear()
    writer.complete()
    new, pointer = ".writing_global_step_4", "latest_checkpointed_iteration.txt"
    assert set(done[:2]) == {f"{new}/actor/metadata.json", f"{new}/actor/weights"}
    assert done[2:] == [
        f"{new}/actor",
        new,
        f"{new}/trainer.json.new",
        "trainer.json.new -> trainer.json",
        new,
        f"{new} -> global_step_4",
        ".",
        f"{pointer}.new",
        f"{pointer}.new -> {pointer}",
        ".",
    ]


@pytest.mark.parametrize("newer", [True, False], ids=["new and complete", "replaced and complete"])
def test_recovery_prefers_a_complete_checkpoint_to_a_damaged_one_with_the_final_name(
    tmp_path: Path, newer: bool
) -> None:
    write(tmp_path)
    if newer:
        begin(tmp_path, content="complete")._mark_as_written()
    else:
        shutil.copytree(final_folder(tmp_path, 4), replaced := tmp_path / ".replaced_global_step_4")
        (replaced / "actor" / "weights").write_text("complete")
    (final_folder(tmp_path, 4) / "trainer.json").write_text("")
    recover(tmp_path)
    assert damage(final_folder(tmp_path, 4)) is None and weights(tmp_path, 4) == "complete"
    assert names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"]


def test_a_folder_that_cannot_even_be_looked_at_is_no_error_of_its_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    writer = begin(tmp_path)
    monkeypatch.setattr(Path, "exists", refuse)
    writer.discard()
    assert ".writing_global_step_4 cannot be removed: [Errno 13] Permission denied" in caplog.text


# ---- how many are kept


def test_old_checkpoints_are_removed_except_the_best_and_those_of_later_steps(tmp_path: Path) -> None:
    write(tmp_path, 2, 4, best=Best("m", 1.0, 4))
    write(tmp_path, 6, 8, 10, 20)
    assert remove_old(tmp_path, newest=10, keep=None) == []
    assert remove_old(tmp_path, newest=10, keep=2) == [2, 6]
    assert steps_of(tmp_path) == [4, 8, 10, 20] and (tmp_path / "best").resolve() == tmp_path / "global_step_4"
    assert remove_old(tmp_path, newest=10, keep=1) == [8]
    assert steps_of(tmp_path) == [4, 10, 20]


def test_a_kill_at_any_operation_of_a_removal_leaves_no_half_checkpoint(tmp_path: Path, quick_disk: None) -> None:
    for number in range(50):
        root = tmp_path / str(number)
        root.mkdir()
        write(root, 2, 4, 6)
        killed = exits_at(number, lambda root=root: remove_old(root, newest=6, keep=1))  # type: ignore[misc]
        assert all(damage(final_folder(root, step)) is None for step in steps_of(root)) and 6 in steps_of(root)
        recover(root)
        assert not list(root.glob(".removing*"))
        if not killed:
            assert steps_of(root) == [6] and number > 3
            return


# ---- the best


def test_the_best_is_a_link_that_follows_its_record_even_after_a_crash(tmp_path: Path) -> None:
    for step, value in ((2, 0.1), (4, 0.3), (6, None)):
        write(tmp_path, step, best=None if value is None else Best("val/data/score", value, step))
    assert (tmp_path / "best").readlink() == Path("global_step_4")
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("global_step_2")  # the crash came between record and link
    assert read_best(tmp_path, "val/data/score", until=6) == Best("val/data/score", 0.3, 4)
    assert (tmp_path / "best").readlink() == Path("global_step_4")


def test_weights_before_training_are_the_best_without_a_link(tmp_path: Path) -> None:
    before = Best("a", 0.5, 0, has_checkpoint=False)
    keep_best(tmp_path, before)
    assert read_best(tmp_path, "a", until=4) == before and not (tmp_path / "best").exists()
    write(tmp_path, 2, best=Best("a", 0.6, 2))
    assert (tmp_path / "best").readlink() == Path("global_step_2")
    assert read_best(tmp_path, "a", until=1) == before and not (tmp_path / "best").is_symlink()
    forget_best(tmp_path)  # a run that starts afresh
    assert read_best(tmp_path, "a", until=4) is None


def test_of_the_best_count_those_that_are_there_by_this_metric_up_to_this_step(tmp_path: Path) -> None:
    assert read_best(tmp_path, "val/data/score", until=9) is None and not list(tmp_path.iterdir())
    for step in (2, 4, 6, 8):
        write(tmp_path, step, best=Best("a" if step < 8 else "b", step, step))
    assert read_best(tmp_path, None, until=8) == Best("b", 8, 8)
    assert read_best(tmp_path, "a", until=8) == Best("a", 6, 6)
    (tmp_path / "global_step_6" / "actor" / "metadata.json").unlink()
    assert read_best(tmp_path, "a", until=6) == Best("a", 4, 4)
    assert read_best(tmp_path, "a", until=3) == Best("a", 2, 2)
    assert read_best(tmp_path, "b", until=3) is None and not (tmp_path / "best").is_symlink()
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json cannot be read"):
        read_best(tmp_path, "a", until=3)
