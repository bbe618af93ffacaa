"""A writer reports what became of it, and neither outlives the actor nor hides its death."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from recipe_gkd.actor import writer_process
from recipe_gkd.actor.writer_process import WriterProcess, kill_all, wait_for_any

pytestmark = pytest.mark.timeout(120)


def _wait(writer: WriterProcess) -> None:
    while not writer.has_ended():
        wait_for_any([writer], 10)


def _sleep() -> None:
    time.sleep(600)


def test_result_and_error_of_the_function_are_reported(tmp_path: Path) -> None:
    good = WriterProcess(lambda: list(range(100_000)))
    bad = WriterProcess(lambda: (tmp_path / "nowhere" / "file").write_text(""))
    for writer in (good, bad):
        _wait(writer)
    assert good.failure() is None and good.result()[-1] == 99_999
    assert bad.failure() == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/nowhere/file'"


def test_killed_writer_is_reported_with_its_signal() -> None:
    writer = WriterProcess(_sleep)
    assert not writer.has_ended() and writer.failure() is None
    os.kill(writer.pid, signal.SIGKILL)
    _wait(writer)
    assert "was killed by SIGKILL" in str(writer.failure())


def test_writer_of_a_process_with_more_than_1024_open_files() -> None:
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


def test_stopped_writer_can_be_killed() -> None:
    writer = WriterProcess(_sleep)
    os.kill(writer.pid, signal.SIGSTOP)
    assert kill_all([writer]) and not psutil.pid_exists(writer.pid)


def test_all_writers_are_killed_before_any_is_waited_for_and_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a hung disk, where a killed process does not end."""
    writers = [WriterProcess(_sleep) for _ in range(3)]
    killed: list[int] = []
    try:
        with monkeypatch.context() as hung:
            hung.setattr(os, "kill", lambda pid, _: killed.append(pid))
            hung.setattr(writer_process, "KILL_DEADLINE_S", 0.5)
            began = time.monotonic()
            assert not kill_all(writers)
            assert time.monotonic() - began < 1.2, "three deadlines would be 1.5 s"
        assert killed == [writer.pid for writer in writers]
        assert f"have not ended, as they wait for a disk: {', '.join(map(str, killed))}" in caplog.text
    finally:
        assert kill_all(writers)


def test_writer_holds_none_of_the_connections_of_the_actor() -> None:
    own, peer = socket.socketpair()
    ready, held = os.pipe()
    started, starting = os.pipe()
    writer = WriterProcess(_sleep)
    try:
        own.close()
        os.close(held)
        peer.settimeout(30)
        assert peer.recv(1) == b"", "the peer must see the end of the connection while the writer lives"
        assert os.read(ready, 1) == b""
        assert not writer.has_ended()
    finally:
        kill_all([writer])
        peer.close()
        for fd in (ready, started, starting):
            os.close(fd)


def _actor_class() -> Any:
    """Return a class that Ray sends by value, because its workers cannot import this module."""

    class Actor:
        def start(self) -> tuple[int, int]:
            """Fork a writer from a thread that ends, as Ray's may."""
            pids: list[int] = []
            thread = threading.Thread(target=lambda: pids.append(WriterProcess(lambda: time.sleep(600)).pid))
            thread.start()
            thread.join()
            return os.getpid(), pids[0]

        def train(self) -> None:
            time.sleep(600)

    return ray.remote(Actor)


def test_writer_outlives_the_thread_that_forked_it_but_not_the_actor(ray_session: Any) -> None:
    actor = _actor_class().options(num_cpus=0).remote()
    actor_pid, writer_pid = ray.get(actor.start.remote(), timeout=60)
    training = actor.train.remote()
    writer = psutil.Process(writer_pid)
    with pytest.raises(psutil.TimeoutExpired):
        writer.wait(timeout=2)
    os.kill(actor_pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(training, timeout=20)
    writer.wait(timeout=20)
