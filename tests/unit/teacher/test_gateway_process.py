"""Process of the gateway: its end with the proxy, and with a request in flight; requests of clients that have gone."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from teacher import TeacherClient
from teacher.launcher.pid_files import write_pid_file
from tests._support.fake_worker import FakeEngine, running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import running_proxy
from tests._support.waiting import PATIENCE_S, wait_until

Start = Callable[..., "subprocess.Popen[str]"]
STOP_TIMEOUT_S = 10
"""Default of the option: a launcher kills a process that ends later."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a gateway and returns its process once it serves."""
    processes = []

    def start(*flags: str) -> subprocess.Popen[str]:
        ready = tmp_path / "gateway.ready"
        command = [sys.executable, "-m", "teacher", "gateway", "--ready-file", str(ready)]
        process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        wait_until(lambda: ready.exists() or process.poll() is not None)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_gateway_ends_with_process_of_pid_file(start: Start, tmp_path: Path) -> None:
    proxy, file = subprocess.Popen(["sleep", "3600"]), tmp_path / "proxy.pid"
    try:
        write_pid_file(file, proxy.pid)
        gateway = start("--port", str(free_port()), "--http-port", "0", "--end-with", str(file))
        assert gateway.poll() is None
    finally:
        proxy.kill()
        proxy.wait(timeout=PATIENCE_S)
    _, stderr = gateway.communicate(timeout=PATIENCE_S)
    assert gateway.returncode == 1 and f"the proxy of {file} has ended, and the gateway with it" in stderr


def test_gateway_with_request_in_flight_ends_before_a_launcher_kills_it(start: Start) -> None:
    port, engine = free_port(), FakeEngine()
    engine.gate.clear()
    body = json.dumps({"prompt": [1, 2], "prompt_logprobs": 1}).encode()

    def post() -> None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=PATIENCE_S)

    client = threading.Thread(target=post)
    with running_proxy() as proxy, running_worker(proxy.backend_port, engine):
        gateway = start("--port", str(proxy.frontend_port), "--http-port", str(port))
        client.start()
        assert engine.added.acquire(timeout=PATIENCE_S)
        gateway.terminate()
        assert gateway.wait(timeout=STOP_TIMEOUT_S) == 0
        client.join(timeout=PATIENCE_S)
        assert not client.is_alive()


def test_request_of_client_that_has_gone_is_canceled_at_the_service(start: Start) -> None:
    port, engine = free_port(), FakeEngine()
    engine.gate.clear()
    body = json.dumps({"prompt": [1, 2], "prompt_logprobs": 1}).encode()
    with running_proxy() as proxy, running_worker(proxy.backend_port, engine):
        start("--port", str(proxy.frontend_port), "--http-port", str(port))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", body)
        assert engine.added.acquire(timeout=PATIENCE_S)
        connection.close()
        with TeacherClient(server_port=proxy.frontend_port) as client:
            wait_until(lambda: client.status().totals.canceled == 1)
