"""Refusals by the machine are one clear line, and a second signal ends a command that waits."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from teacher import TeacherClient, TeacherError, TeacherSequence, stop_signal
from teacher.__main__ import main
from teacher.commands import queries, service
from teacher.proxy import doors
from teacher.wire.auth import client_keys, server_keys
from teacher.wire.make_keys import make_keys
from tests._support.fake_worker import FakeEngine, running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import REPO, StopFlag, running_proxy

pytestmark = pytest.mark.timeout(60)

PROXY = ["proxy", "--frontend-port", "0", "--backend-port", "0", "--http-port", "-1"]


@pytest.fixture(autouse=True)
def signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process must not change what signals do to it."""
    monkeypatch.setattr(service, "StopSignal", StopFlag)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line on stderr."""
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-1]


def test_a_port_in_use_is_named_with_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    with running_proxy() as other:
        said = refused([*PROXY[:2], str(other.frontend_port), *PROXY[3:]], capsys)
    assert said.startswith(f"teacher proxy: cannot listen on 127.0.0.1:{other.frontend_port}: Address already in use")
    assert "stop what uses the port (teacher/stop_server.sh), or choose another with PROXY_FRONTEND_PORT" in said


def test_an_address_of_no_interface_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    said = refused([*PROXY, "--bind", "192.0.2.1", "--auth-dir", str(tmp_path / "keys")], capsys)
    assert "cannot listen on 192.0.2.1:0" in said and "correct --bind (BIND)" in said


def test_a_protected_port_is_named() -> None:
    class Protected:
        def bind(self, address: str) -> None:
            raise zmq.ZMQError(errno.EACCES)

    with pytest.raises(TeacherError, match=r"listen on 10.0.0.1:80: Permission denied; only root may listen"):
        doors._bind(Protected(), "10.0.0.1", 80)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [server_keys, client_keys])
def test_keys_of_another_user_are_named(read: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Refused by a stand-in: root is refused nothing."""
    make_keys(tmp_path / "keys")
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.suffix == ".key_secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(
        TeacherError, match=r"the keys in .*key_secret cannot be read by user id \d+: Permission denied"
    ):
        read(tmp_path / "keys")


def test_a_ready_file_that_cannot_be_written_or_is_a_link_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    code = "import sys; from teacher.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for path in (link, tmp_path / "nowhere" / "ready"):
        command = [sys.executable, "-c", code, *PROXY, "--ready-file", str(path)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"--ready-file {path} cannot be written" in done.stderr
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), zmq.ZMQError(errno.EMFILE)])
@pytest.mark.parametrize("command", ["proxy", "status"])
def test_whatever_else_the_machine_refuses_is_one_line_after_the_traceback_of_a_process_that_serves(
    error: Exception, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(doors, "make_socket", refuse)
    monkeypatch.setattr(queries, "_client", refuse)
    assert main([*PROXY, "--bind", "127.0.0.1"] if command == "proxy" else [command]) == 1
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"teacher {command}: the system refused: ") and "Too many open files; " in last
    assert ("Traceback (most recent call last):" in before) == (command == "proxy")
    assert ("in refuse" in "".join(before)) == ("--log-level DEBUG" not in last) == (command == "proxy")


def test_a_second_signal_ends_a_proxy_that_waits_for_its_workers(tmp_path: Path) -> None:
    """Copies of the first, within a second, do not count."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "teacher", "proxy", "--frontend-port", str(ports[0]), "--backend-port"]
    command += [str(ports[1]), "--http-port", "-1", "--ready-file", str(tmp_path / "ready")]
    engine = FakeEngine()
    engine.gate.clear()
    proxy = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        with running_worker(ports[1], engine), TeacherClient(server_port=ports[0]) as client:
            client.submit([TeacherSequence(np.array([1, 2], np.int32), 1)], 30)
            assert engine.added.acquire(timeout=10)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                proxy.send_signal(number)
            threading.Event().wait(stop_signal.SAME_STOP_S + 0.2)
            assert proxy.poll() is None, "it finishes what its worker has"
            proxy.send_signal(signal.SIGTERM)
            assert proxy.wait(timeout=20) == 128 + signal.SIGTERM, "0 is the end of its own waiting"
    finally:
        proxy.kill()
        _, said = proxy.communicate(timeout=10)
    assert "told to stop: 1 requests are finished" in said


def test_a_second_signal_ends_a_process_whose_main_thread_hangs() -> None:
    code = """
import time
from teacher.stop_signal import StopSignal
stop = StopSignal()
print("ready", flush=True)
while True:
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        threading.Event().wait(stop_signal.SAME_STOP_S + 0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_second_signal_ends_a_worker_whose_engine_does_not_close() -> None:
    code = """
import sys, time
from tests._support.fake_worker import FakeEngine
from teacher.__main__ import main
from teacher.commands import service

class Engine(FakeEngine):
    def close(self):
        print("closing", flush=True)
        time.sleep(60)

service.load_engine = lambda *_: Engine()
service._touch = lambda _: print("registered", flush=True)
sys.exit(main(["worker", "--ckpt-path", "none", "--backend-port", sys.argv[1]]))
"""
    with running_proxy() as proxy:
        command = [sys.executable, "-c", code, str(proxy.backend_port)]
        worker = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None and worker.stdout.readline() == "registered\n"
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout.readline() == "closing\n"
            threading.Event().wait(stop_signal.SAME_STOP_S + 0.2)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(timeout=20) == 128 + signal.SIGTERM
        finally:
            worker.kill()
            worker.communicate(timeout=10)
