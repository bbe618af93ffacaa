"""Checkpoint folders: a folder with a final name is complete after a kill or a disk error at any moment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.checkpoints import folders
from recipe_gkd.checkpoints.folders import damage, final_folder, read_latest, recover, steps_of
from recipe_gkd.checkpoints.newest import newest_complete
from recipe_gkd.checkpoints.state import Best
from recipe_gkd.checkpoints.store import forget_best, keep_best, read_best, recorded_best, remove_old
from recipe_gkd.errors import CheckpointError
from tests._support.checkpoint_files import begin_checkpoint, list_names, read_shard, write_checkpoints
from tests._support.errors import raises

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "shutil.rmtree")


def test_discard_leaves_only_previous_checkpoint(tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    writer = begin_checkpoint(tmp_path, 5)
    assert read_latest(tmp_path) == 4
    writer.discard()
    assert list_names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"]


def test_complete_without_actor_metadata_fails_and_removes_folder(tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    for content in (None, ""):  # the last file of the actors is missing or empty
        writer = begin_checkpoint(tmp_path, 5)
        file = writer.folder / "actor" / "metadata.json"
        file.unlink() if content is None else file.write_text(content)
        with raises(CheckpointError, path=file):
            writer.complete()
        assert (
            list_names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"]
            and read_latest(tmp_path) == 4
        )


def test_recover_removes_late_writes_into_discarded_folder(tmp_path: Path) -> None:
    """Actors may continue to write, into open files and into a folder that they make again."""
    writer = begin_checkpoint(tmp_path)
    with (writer.folder / "actor" / "weights").open("a") as file:
        writer.discard()
        file.write("more")
    assert list_names(tmp_path) == []
    (writer.folder / "actor").mkdir(parents=True)
    (writer.folder / "actor" / "late").write_text("x")
    recover(tmp_path)
    assert list_names(tmp_path) == []


# ---- replacing a step


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: a kill of the process loses no data that the kernel has."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def exits_at(event_number: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a fork that is killed before file operation ``event_number``. Return True if it was killed."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    left = event_number

    def count(event: str, _: Any) -> None:
        nonlocal left
        if event in FILE_EVENTS:
            left -= 1
            if left < 0:
                os._exit(1)

    sys.addaudithook(count)
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("latest", [4, 8], ids=["latest", "before latest"])
def test_kill_during_replacement_leaves_complete_checkpoint(tmp_path: Path, latest: int, quick_disk: None) -> None:
    for number in range(200):
        root = tmp_path / str(number)
        root.mkdir()
        write_checkpoints(root, *sorted({4, latest}))

        def replace_checkpoint(root: Path = root) -> None:
            begin_checkpoint(root, content="new", best=Best("m", 1.0, 4)).complete()

        killed = exits_at(number, replace_checkpoint)
        recover(root)
        assert damage(final_folder(root, 4)) is None and read_shard(root, 4) in ("4", "new")
        latest_step = read_latest(root)
        assert latest_step is not None and damage(final_folder(root, latest_step)) is None
        best = read_best(root, "m", until=9)
        assert best is None or (root / "best").resolve() == root / "global_step_4"
        assert not [name for name in list_names(root) if name.startswith((".writing", ".replaced", ".removing"))]
        if not killed:
            assert read_shard(root, 4) == "new" and latest_step == 4 and number > 15
            return
    pytest.fail("the replacement did not end")


def test_kill_during_save_leaves_no_complete_checkpoint_that_a_run_ignores(tmp_path: Path, quick_disk: None) -> None:
    """Steps after the latest one count as an abandoned run, and their best records are removed."""
    for number in range(200):
        root = tmp_path / str(number)
        root.mkdir()
        write_checkpoints(root, 2)

        def save(root: Path = root) -> None:
            begin_checkpoint(root, best=Best("m", 1.0, 4)).complete()

        killed = exits_at(number, save)
        recover(root)
        newest = newest_complete(root)
        assert newest.step == steps_of(root)[-1] and not newest.reasons
        assert recorded_best(root) == read_best(root, "m", until=newest.step)
        if not killed:
            assert newest.step == 4 and number > 10
            return
    pytest.fail("the save did not end")


def test_kill_during_recovery_is_harmless(tmp_path: Path, quick_disk: None) -> None:
    for number in range(200):
        root = tmp_path / str(number)
        root.mkdir()
        write_checkpoints(root, 4)
        begin_checkpoint(root, 8)  # incomplete
        new = begin_checkpoint(root, content="new")
        new._mark_as_written()
        final_folder(root, 4).rename(root / ".replaced_global_step_4")
        killed = exits_at(number, lambda root=root: recover(root))  # type: ignore[misc]
        recover(root)
        assert read_shard(root, 4) == "new" and list_names(root) == [
            "global_step_4",
            "latest_checkpointed_iteration.txt",
        ]
        if not killed:
            assert number > 5
            return


def test_failed_rename_keeps_folder_for_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoints(tmp_path)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing") and target == final_folder(tmp_path, 4):
            raise OSError(39, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    writer = begin_checkpoint(tmp_path, content="new")
    with raises(CheckpointError, path=final_folder(tmp_path, 4)) as caught:
        writer.complete()
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == 39
    writer.discard()
    assert read_shard(tmp_path, 4) == "4" and read_latest(tmp_path) == 4
    assert damage(folders.writing_folder(tmp_path, 4)) is None
    shutil.rmtree(final_folder(tmp_path, 4))
    recover(tmp_path)  # it cannot rename the folder either
    assert damage(folders.writing_folder(tmp_path, 4)) is None
    monkeypatch.undo()
    recover(tmp_path)
    assert read_shard(tmp_path, 4) == "new"


def test_undeletable_old_folder_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS an open file stays as .nfsXXXX."""
    write_checkpoints(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    begin_checkpoint(tmp_path, content="new").complete()
    assert read_shard(tmp_path, 4) == "new" and read_latest(tmp_path) == 4 and steps_of(tmp_path) == [4]


def test_complete_flushes_content_then_pointer_then_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    rename, move = Path.rename, Path.replace
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(f"{self.name} -> {to.name}"), rename(self, to)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append(f"{self.name} -> {to.name}"), move(self, to)))
    writer = begin_checkpoint(tmp_path)
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
        f"{pointer}.new",
        f"{pointer}.new -> {pointer}",
        ".",
        f"{new} -> global_step_4",
        ".",
    ]


@pytest.mark.parametrize("newer", [True, False], ids=["new", "replaced"])
def test_recover_prefers_complete_to_damaged_checkpoint(tmp_path: Path, newer: bool) -> None:
    write_checkpoints(tmp_path)
    if newer:
        begin_checkpoint(tmp_path, content="complete")._mark_as_written()
    else:
        shutil.copytree(final_folder(tmp_path, 4), replaced := tmp_path / ".replaced_global_step_4")
        (replaced / "actor" / "weights").write_text("complete")
    (final_folder(tmp_path, 4) / "trainer.json").write_text("")
    recover(tmp_path)
    assert damage(final_folder(tmp_path, 4)) is None and read_shard(tmp_path, 4) == "complete"
    assert list_names(tmp_path) == ["global_step_4", "latest_checkpointed_iteration.txt"]


def test_removal_of_inaccessible_folder_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    writer = begin_checkpoint(tmp_path)
    monkeypatch.setattr(Path, "exists", fail)
    writer.discard()
    assert ".writing_global_step_4 cannot be removed: [Errno 13] Permission denied" in caplog.text


# ---- retention


def test_remove_old_keeps_best_and_later_steps(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 2, 4, best=Best("m", 1.0, 4))
    write_checkpoints(tmp_path, 6, 8, 10, 20)
    assert remove_old(tmp_path, newest=10, keep=None) == []
    assert remove_old(tmp_path, newest=10, keep=2) == [2, 6]
    assert steps_of(tmp_path) == [4, 8, 10, 20] and (tmp_path / "best").resolve() == tmp_path / "global_step_4"
    assert remove_old(tmp_path, newest=10, keep=1) == [8]
    assert steps_of(tmp_path) == [4, 10, 20]


def test_kill_during_removal_leaves_complete_checkpoints(tmp_path: Path, quick_disk: None) -> None:
    for number in range(50):
        root = tmp_path / str(number)
        root.mkdir()
        write_checkpoints(root, 2, 4, 6)
        killed = exits_at(number, lambda root=root: remove_old(root, newest=6, keep=1))  # type: ignore[misc]
        assert all(damage(final_folder(root, step)) is None for step in steps_of(root)) and 6 in steps_of(root)
        recover(root)
        assert not list(root.glob(".removing*"))
        if not killed:
            assert steps_of(root) == [6] and number > 3
            return


# ---- best records


def test_best_link_follows_record_after_crash(tmp_path: Path) -> None:
    for step, value in ((2, 0.1), (4, 0.3), (6, None)):
        write_checkpoints(tmp_path, step, best=None if value is None else Best("val/data/score", value, step))
    assert (tmp_path / "best").readlink() == Path("global_step_4")
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("global_step_2")  # a crash between record and link
    assert read_best(tmp_path, "val/data/score", until=6) == Best("val/data/score", 0.3, 4)
    assert (tmp_path / "best").readlink() == Path("global_step_4")


def test_best_before_training_has_no_link(tmp_path: Path) -> None:
    before = Best("a", 0.5, 0, has_checkpoint=False)
    keep_best(tmp_path, before)
    assert read_best(tmp_path, "a", until=4) == before and not (tmp_path / "best").exists()
    write_checkpoints(tmp_path, 2, best=Best("a", 0.6, 2))
    assert (tmp_path / "best").readlink() == Path("global_step_2")
    assert read_best(tmp_path, "a", until=1) == before and not (tmp_path / "best").is_symlink()
    forget_best(tmp_path)  # a new run in the same folder
    assert read_best(tmp_path, "a", until=4) is None


def test_read_best_filters_by_metric_step_and_existence(tmp_path: Path) -> None:
    assert read_best(tmp_path, "val/data/score", until=9) is None and not list(tmp_path.iterdir())
    for step in (2, 4, 6, 8):
        write_checkpoints(tmp_path, step, best=Best("a" if step < 8 else "b", step, step))
    assert read_best(tmp_path, None, until=8) == Best("b", 8, 8)
    assert read_best(tmp_path, "a", until=8) == Best("a", 6, 6)
    (tmp_path / "global_step_6" / "actor" / "metadata.json").unlink()
    assert read_best(tmp_path, "a", until=6) == Best("a", 4, 4)
    assert read_best(tmp_path, "a", until=3) == Best("a", 2, 2)
    assert read_best(tmp_path, "b", until=3) is None and not (tmp_path / "best").is_symlink()
    (tmp_path / "best.json").write_text("{")
    with raises(CheckpointError, path=tmp_path / "best.json"):
        read_best(tmp_path, "a", until=3)
