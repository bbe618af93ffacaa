"""Writer processes: reports of their result, their death, and their connections."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from recipe_gkd.actor.checkpoint import writer_process
from recipe_gkd.actor.checkpoint.writer_process import WriterProcess, kill_all, wait_for_any


def _wait(writer: WriterProcess) -> None:
    while not writer.has_ended():
        wait_for_any([writer], 10)


def _sleep() -> None:
    time.sleep(3600)


def test_writer_after_end_reports_result_or_error(tmp_path: Path) -> None:
    good = WriterProcess(lambda: list(range(100_000)))
    bad = WriterProcess(lambda: (tmp_path / "nowhere" / "file").write_text(""))
    for writer in (good, bad):
        _wait(writer)
    assert good.failure() is None and good.result()[-1] == 99_999
    failure = bad.failure()
    assert failure is not None
    assert failure.what == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/nowhere/file'"


def test_failure_of_killed_writer_names_signal() -> None:
    writer = WriterProcess(_sleep)
    assert not writer.has_ended() and writer.failure() is None
    os.kill(writer.pid, signal.SIGKILL)
    _wait(writer)
    failure = writer.failure()
    assert failure is not None and "SIGKILL" in failure.what


def test_writer_with_over_1024_open_files_works() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        writer = WriterProcess(lambda: "written")
        _wait(writer)
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert writer.failure() is None and writer.result() == "written"


def test_kill_all_with_stopped_writer_ends_it() -> None:
    writer = WriterProcess(_sleep)
    os.kill(writer.pid, signal.SIGSTOP)
    assert kill_all([writer]) and not psutil.pid_exists(writer.pid)


def test_kill_all_with_hung_disk_kills_all_then_waits_one_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that waits for a hung disk does not end when it is killed."""
    writers = [WriterProcess(_sleep) for _ in range(3)]
    killed: list[int] = []
    waits_s: list[float] = []

    def record_wait(running: list[WriterProcess], timeout_s: float) -> None:
        assert len(killed) == len(writers), "all writers are killed before the first wait"
        waits_s.append(timeout_s)
        wait_for_any(running, timeout_s)

    try:
        with monkeypatch.context() as hung:
            hung.setattr(os, "kill", lambda pid, _: killed.append(pid))
            hung.setattr(writer_process, "KILL_DEADLINE_S", 0.5)
            hung.setattr(writer_process, "wait_for_any", record_wait)
            assert not kill_all(writers)
        assert killed == [writer.pid for writer in writers]
        assert sum(waits_s) <= 0.5, "all writers share one deadline"
        assert f"have not ended, because they wait for a disk: {', '.join(map(str, killed))}" in caplog.text
    finally:
        assert kill_all(writers)


def test_writer_holds_no_connections_of_actor() -> None:
    own, peer = socket.socketpair()
    ready, held = os.pipe()
    started, starting = os.pipe()
    writer = WriterProcess(_sleep)
    try:
        own.close()
        os.close(held)
        peer.settimeout(30)
        assert peer.recv(1) == b"", "the connection must be closed for the peer while the writer runs"
        assert os.read(ready, 1) == b""
        assert not writer.has_ended()
    finally:
        kill_all([writer])
        peer.close()
        for fd in (ready, started, starting):
            os.close(fd)
