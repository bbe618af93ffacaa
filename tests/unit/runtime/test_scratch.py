from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from recipe_gkd.diagnostics import stack_dumps
from recipe_gkd.runtime import scratch
from teacher.common.process_id import ProcessId, boot_id, process_id
from tests._support.waiting import wait_until


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that replaces the machine's temporary folder."""
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def running(program: str, parent: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a program with the temporary folder ``parent``. Yield the process and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(parent)},
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def process_with_folder(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    program = (
        "from recipe_gkd.runtime import scratch; scratch._RETENTION_S = 1; print(scratch.scratch_folder(), flush=True)"
    )
    with running(program, parent) as (process, folder):
        yield process, Path(folder)


class TestScratchFolder:
    def test_folder_is_private_found_by_pid_and_removed_after_a_kill(self, parent: Path) -> None:
        with process_with_folder(parent) as (process, folder):
            assert folder.parent == parent and folder.stat().st_mode & 0o777 == 0o700
            assert scratch.folders_of(process.pid) == [folder]
            scratch.remove_stale()
            assert folder.exists()
        wait_until(lambda: not folder.exists())  # The watcher of the killed process removes it.

    def test_stale_folder_of_this_machine_is_removed_and_others_are_kept(self, parent: Path) -> None:
        own = process_id(os.getpid())
        assert own is not None
        stale = parent / f"gkd_{scratch.machine()}_{own.pid}_{own.start_ticks - 1:x}_x"
        alive = parent / f"gkd_{scratch.machine()}_{own.pid}_{own.start_ticks:x}_x"
        of_a_container = parent / f"gkd_{scratch.machine()}1_{own.pid}_{own.start_ticks - 1:x}_x"
        for folder in (stale, alive, of_a_container):
            folder.mkdir(mode=0o700)
        scratch.remove_stale()
        assert not stale.exists() and alive.exists() and of_a_container.exists()

    def test_remove_folders_of_earlier_process_with_the_same_pid_keeps_the_folder(self, parent: Path) -> None:
        with process_with_folder(parent) as (process, folder):
            own = process_id(process.pid)
            assert own is not None
            scratch.remove_folders_of(replace(own, start_ticks=own.start_ticks - 1))
            assert folder.exists()
            scratch.remove_folders_of(own)
            assert not folder.exists()

    @pytest.mark.parametrize("kind", ["link", "open", "file", "other owner"])
    def test_folder_that_is_not_private_is_neither_used_nor_removed(
        self, parent: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        name = parent / f"gkd_{scratch.machine()}_77_1_x"
        victim = parent / "victim"
        victim.mkdir(mode=0o700)
        (victim / "file").write_text("precious")
        if kind == "link":
            name.symlink_to(victim)
        elif kind == "open":
            name.mkdir(mode=0o777)
            name.chmod(0o777)
        elif kind == "other owner":
            name.mkdir(mode=0o700)
            other = os.geteuid() + 1
            monkeypatch.setattr(scratch.os, "geteuid", lambda: other)
        else:
            name.touch(mode=0o600)
        assert scratch.folders_of(77) == []
        scratch.remove_folders_of(ProcessId(boot_id(), 77, 1))
        scratch.remove_stale()
        assert os.path.lexists(name) and (victim / "file").read_text() == "precious"


def test_stack_dump_file_has_no_name_in_the_temporary_folder(parent: Path) -> None:
    planted = parent / f"recipe_gkd_{os.getuid()}"  # Another user could create it.
    planted.mkdir()
    program = "from recipe_gkd.diagnostics.stack_dumps import allow_stack_dumps as f; f(); print('ready', flush=True)"
    with running(program, parent) as (process, line):
        assert line == "ready"
        assert stack_dumps.stack_dump_file(process.pid) is not None
        assert stack_dumps.stack_dump_file(os.getppid()) is None
        assert [path.name for path in parent.rglob("*")] == [planted.name]
    assert stack_dumps.stack_dump_file(process.pid) is None
