"""Run folder: one run at a time, and no files of a rejected start."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recipe_gkd.checkpoints.run_folder import CONFIG, RunFolder, run_folder
from recipe_gkd.checkpoints.run_lock import LOCK, locked
from recipe_gkd.config import Config
from recipe_gkd.errors import ModelError, RunFolderInUse, WorkerDied
from recipe_gkd.main_gkd import main
from tests._support.base_config import CONFIG_NAME, base_config
from tests._support.errors import raises


def config(root: Path, *overrides: str) -> Config:
    return base_config(f"trainer.default_local_dir={root}", *overrides)


@pytest.fixture
def root_logging() -> Iterator[None]:
    """Restore the log handlers and signal handlers that ``main`` sets."""
    handlers, level = logging.root.handlers[:], logging.root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    logging.root.handlers[:], logging.root.level = handlers, level
    for number, handler in signals.items():
        signal.signal(number, handler)


def command(folder: Path, *overrides: str) -> int:
    required = ["data.train_files=none.parquet", "actor_rollout_ref.model.path=nowhere/at/all"]
    return main(["--config-name", CONFIG_NAME, *required, f"trainer.default_local_dir={folder}", *overrides])


# ---- lock

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from recipe_gkd.checkpoints.run_lock import locked
with locked(Path(sys.argv[1])):
    if not (forked := os.fork()):
        time.sleep(3600)
    started = subprocess.Popen(["sleep", "3600"], close_fds=False)
    print(forked, started.pid, flush=True)
    time.sleep(3600)
"""


def test_second_run_is_rejected_until_first_process_ends(
    tmp_path: Path, root_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    children = [int(pid) for pid in holder.stdout.readline().split()]
    try:
        (tmp_path / "metrics.jsonl").write_text("first run\n")
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert command(tmp_path) == 1
        message = capsys.readouterr().err
        assert f"is in use by another run, on host {socket.gethostname()} with pid {holder.pid}, since " in message
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["process"]["pid"] == os.getpid()
        assert all(Path(f"/proc/{pid}").exists() for pid in children)
    finally:
        for pid in (holder.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_removed_lock_file_allows_new_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        with raises(RunFolderInUse, path=tmp_path, pid=os.getpid(), host=socket.gethostname()), locked(tmp_path):
            pass
        (tmp_path / LOCK).unlink()
        with locked(tmp_path):  # a new file is a new lock
            pass
    with locked(tmp_path):
        pass


def test_lock_is_taken_on_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder may have removed the file after it was opened and before it was locked."""
    flock, calls = fcntl.flock, list[int]()

    def remove_then_lock(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    with locked(tmp_path):
        assert len(calls) == 2 and (tmp_path / LOCK).exists()


def test_file_system_without_locks_warns_and_checks_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path):
        assert "does not support locks (No locks available)" in caplog.text and "was none" in caplog.text
        with raises(RunFolderInUse, path=tmp_path, pid=os.getpid()), locked(tmp_path):
            pass
    owner = json.loads((tmp_path / LOCK).read_text())
    owner["process"]["start_ticks"] -= 1  # another process had this pid
    (tmp_path / LOCK).write_text(json.dumps(owner))
    with locked(tmp_path):
        pass


# ---- rejected starts


def test_rejected_start_leaves_no_folder(
    tmp_path: Path, root_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = f"trainer.trace_file={tmp_path}/traces/of/today.json"
    assert command(tmp_path / "a" / "b", trace) == 1
    assert "nowhere/at/all does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rejected_start_keeps_existing_files(tmp_path: Path, root_logging: None) -> None:
    (tmp_path / "mine").write_text("x")
    assert command(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != LOCK] == ["mine"]
    (tmp_path / "run.log").write_text("earlier run\n")
    assert command(tmp_path) == 1
    assert (tmp_path / "run.log").read_text().startswith("earlier run\n")


@pytest.mark.parametrize(
    ("error", "accepted", "kept"),
    [
        (ModelError("x"), False, False),
        (ModelError("x"), True, True),
        (WorkerDied("x"), False, True),
        (ValueError("x"), False, True),
        (KeyboardInterrupt(), False, True),
    ],
)
def test_log_stays_unless_start_is_rejected(tmp_path: Path, error: BaseException, accepted: bool, kept: bool) -> None:
    with pytest.raises(type(error)), run_folder(config(tmp_path / "run")) as folder:
        (folder.path / "run.log").write_text("log")
        if accepted:
            folder.accept()
        raise error
    assert (tmp_path / "run" / "run.log").exists() == kept == (tmp_path / "run").exists()


# ---- configuration


def test_configuration_of_a_run_is_replaced_once_another_start_trains(tmp_path: Path) -> None:
    """A start that the workers refuse must not change the data types that a later start with ``auto`` keeps."""
    for text, trains in (("dtype: bfloat16", True), ("dtype: float32", False), ("dtype: float16", True)):
        before = (tmp_path / CONFIG).read_text() if (tmp_path / CONFIG).exists() else text
        folder = RunFolder(tmp_path)
        folder.store_config(text)
        assert (tmp_path / CONFIG).read_text() == before
        if trains:
            folder.begin_training()
            folder.begin_training()
            assert (tmp_path / CONFIG).read_text() == text
    assert (tmp_path / CONFIG).read_text() == "dtype: float16"
