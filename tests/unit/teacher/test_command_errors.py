"""Commands: system errors as one clear line, and the end by a second signal."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from teacher import TeacherClient, TeacherSequence, stop_signal
from teacher.__main__ import main
from teacher.commands import queries, service
from teacher.errors import TeacherSetupError
from teacher.proxy import proxy_sockets
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.wire.auth import client_keys, server_keys
from teacher.wire.make_keys import make_keys
from tests._support.errors import raises
from tests._support.fake_worker import FakeEngine, running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import REPO, StopFlag, running_proxy
from tests._support.waiting import wait_until

PROXY = ["proxy", "--frontend-port", "0", "--backend-port", "0", "--http-port", "-1"]


@pytest.fixture(autouse=True)
def unchanged_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process must not change its signal handlers."""
    monkeypatch.setattr(service, "StopSignal", StopFlag)


def fail_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that fails. Return the last line on stderr."""
    assert main(arguments) == 1
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    return stderr.splitlines()[-1]


def test_proxy_port_in_use_error_names_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with running_proxy() as other:
        stderr = fail_command([*PROXY[:2], str(other.frontend_port), *PROXY[3:]], capsys)
    assert stderr.startswith(f"teacher proxy: cannot listen on 127.0.0.1:{other.frontend_port}: Address already in use")
    assert (
        "stop the process that uses the port (teacher/stop_server.sh), or choose another with PROXY_FRONTEND_PORT"
        in stderr
    )


def test_gateway_port_in_use_error_names_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        stderr = fail_command(["gateway", "--http-port", str(port)], capsys)
    assert stderr.startswith(f"teacher gateway: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert "stop the process that uses the port, or choose another with --http-port (OPENAI_PORT)" in stderr


def test_proxy_foreign_address_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    stderr = fail_command([*PROXY, "--bind", "192.0.2.1", "--auth-dir", str(tmp_path / "keys")], capsys)
    assert "cannot listen on 192.0.2.1:0" in stderr and "correct --bind (BIND)" in stderr


def test_proxy_protected_port_is_named() -> None:
    class Protected:
        def bind(self, address: str) -> None:
            raise zmq.ZMQError(errno.EACCES)

    options = ("--frontend-port", "--backend-port")
    with raises(TeacherSetupError, address="tcp://10.0.0.1:80", options=options):
        proxy_sockets._bind(Protected(), "10.0.0.1", 80)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [server_keys, client_keys])
def test_keys_without_permission_are_named(read: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A patched method refuses access, because root can read every file."""
    make_keys(tmp_path / "keys")
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.suffix == ".key_secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    with raises(TeacherSetupError, options=("--auth-dir",)) as refused:
        read(tmp_path / "keys")
    assert refused.value.path is not None and refused.value.path.suffix == ".key_secret"


def test_ready_file_unwritable_or_link_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
def test_system_error_is_last_line_with_traceback_of_servers(
    error: Exception, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(proxy_sockets, "make_socket", refuse)
    monkeypatch.setattr(queries, "_client", refuse)
    assert main([*PROXY, "--bind", "127.0.0.1"] if command == "proxy" else [command]) == 1
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"teacher {command}: the system refused: ") and "Too many open files; " in last
    assert ("Traceback (most recent call last):" in before) == (command == "proxy")
    assert ("in refuse" in "".join(before)) == ("--log-level DEBUG" not in last) == (command == "proxy")


def test_second_signal_ends_draining_proxy(tmp_path: Path) -> None:
    """Copies of the first signal within a second are ignored."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "teacher", "proxy", "--frontend-port", str(ports[0]), "--backend-port"]
    command += [str(ports[1]), "--http-port", "-1", "--ready-file", str(tmp_path / "ready")]
    engine = FakeEngine()
    engine.gate.clear()
    proxy = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "ready").exists)
        with running_worker(ports[1], engine), TeacherClient(server_port=ports[0]) as client:
            client.submit([TeacherSequence(np.array([1, 2], np.int32), 1)], 30)
            assert engine.added.acquire(timeout=60)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                proxy.send_signal(number)
            threading.Event().wait(stop_signal.DUPLICATE_SIGNAL_WINDOW_S + 0.2)
            assert proxy.poll() is None, "it finishes the requests in flight"
            proxy.send_signal(signal.SIGTERM)
            assert proxy.wait(timeout=60) == 128 + signal.SIGTERM, "0 would be the end of the drain timeout"
    finally:
        proxy.kill()
        _, stderr = proxy.communicate(timeout=60)
    assert "stopping: 1 requests in flight are finished" in stderr


def test_second_signal_ends_blocked_process() -> None:
    code = """
import time
from teacher.stop_signal import StopSignal
stop = StopSignal()
print("ready", flush=True)
while True:
    time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        threading.Event().wait(stop_signal.DUPLICATE_SIGNAL_WINDOW_S + 0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_second_signal_ends_worker_in_engine_close() -> None:
    code = """
import sys, time
from tests._support.fake_worker import FakeEngine
from teacher.__main__ import main
from teacher.commands import service

class Engine(FakeEngine):
    def close(self):
        print("closing", flush=True)
        time.sleep(3600)

service.load_engine = lambda *_: Engine()
service.write_ready_file = lambda _: print("registered", flush=True)
sys.exit(main(["worker", "--ckpt-path", "none", "--backend-port", sys.argv[1]]))
"""
    with running_proxy() as proxy:
        command = [sys.executable, "-c", code, str(proxy.backend_port)]
        worker = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None and worker.stdout.readline() == "registered\n"
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout.readline() == "closing\n"
            threading.Event().wait(stop_signal.DUPLICATE_SIGNAL_WINDOW_S + 0.2)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            worker.kill()
            worker.communicate(timeout=60)


def test_status_reads_the_port_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROXY_FRONTEND_PORT", str(port := free_port()))
    stderr = fail_command(["status", "--timeout-s", "0.2"], capsys)
    assert stderr.startswith(f"teacher status: no teacher service at tcp://127.0.0.1:{port}; ")
    assert "set --server-ip and --port (PROXY_FRONTEND_PORT)" in stderr and "actor_rollout_ref" not in stderr


@pytest.mark.parametrize("service_has_keys", [True, False])
def test_command_with_other_keys_names_its_flag(
    service_has_keys: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys")
    keys = str(tmp_path / "keys")
    with running_proxy(sockets=SocketSettings(keys=server_keys(keys if service_has_keys else None))) as proxy:
        options = ["--port", str(proxy.frontend_port), "--timeout-s", "0.4"]
        stderr = fail_command(["status", *options, *([] if service_has_keys else ["--auth-dir", keys])], capsys)
    expected = "got no --auth-dir, expected" if service_has_keys else f"got --auth-dir={keys!r}, expected"
    assert expected in stderr and " auth_dir" not in stderr
