"""HTTP server of the proxy: /healthz, /metrics, and its limits."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from teacher.errors import TeacherSetupError
from teacher.proxy.http import HttpServer
from teacher.status import ServiceStatus
from tests._support.errors import raises
from tests._support.fake_worker import running_worker
from tests._support.teacher_service import running_proxy
from tests._support.teacher_status import STATUS
from tests._support.waiting import wait_until


class Source:
    """Status source with settable `status` and `age_s`."""

    def __init__(self) -> None:
        self.status, self.age_s = STATUS, 0.5

    def __call__(self) -> tuple[ServiceStatus, float]:
        return self.status, self.age_s


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server(source: Source) -> Iterator[HttpServer]:
    with HttpServer("127.0.0.1", 0, source, request_timeout_s=0.5) as running:
        yield running


def get(server: HttpServer, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def health(server: HttpServer) -> tuple[int, dict[str, Any]]:
    code, body = get(server, "/healthz")
    return code, json.loads(body)


def test_healthz_problem_is_503_with_reason(server: HttpServer, source: Source) -> None:
    assert health(server)[0] == 200
    for change, reason in (
        ({"workers": ()}, "no worker"),
        ({"draining": True}, "shutting down"),
    ):
        source.status = replace(STATUS, **change)
        code, body = health(server)
        assert code == 503 and reason in body["status"]
    source.status, source.age_s = STATUS, 60.0
    code, body = health(server)
    assert code == 503 and "stuck" in body["status"] and body["status_age_s"] == 60.0


def test_metrics_contain_every_status_number(server: HttpServer) -> None:
    code, body = get(server, "/metrics")
    assert code == 200
    families = list(text_string_to_metric_families(body.decode()))
    samples = [sample for family in families for sample in family.samples]
    values = {sample.value for sample in samples if sample.name.startswith("teacher_")}
    for record in (STATUS, STATUS.workers[0], STATUS.clients[0], STATUS.totals):
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, int | float) and field.name not in ("n_logprobs", "protocol_version"):  # labels
                assert float(value) in values, f"{field.name} is missing"
    assert all(family.documentation for family in families)

    def value(name: str, **labels: str) -> float:
        (found,) = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        return found

    assert value("teacher_info", model_name="tiny", protocol_version="4") == 1
    assert value("teacher_requests_total", outcome="refused") == STATUS.totals.refused
    assert value("teacher_requests_total", outcome="canceled") == STATUS.totals.canceled
    assert value("teacher_worker_seconds_total") == STATUS.totals.worker_s
    assert value("teacher_client_oldest_seconds", client='a "client"\n') == 1.5
    assert value("process_open_fds") > 0


def test_metrics_equal_worker_names_are_distinct_series(server: HttpServer) -> None:
    """Prometheus refuses a page with two equal series."""
    series = [line.split(" ")[0] for line in get(server, "/metrics")[1].decode().splitlines() if line[0] != "#"]
    assert len(series) == len(set(series))
    assert 'teacher_worker_busy_ratio{worker="host:1"}' in series


def test_unknown_path_is_404_and_post_is_405(server: HttpServer) -> None:
    assert get(server, "/")[0] == 404 and get(server, "/../../etc/passwd")[0] == 404
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
        peer.sendall(b"POST /healthz HTTP/1.0\r\n\r\n")
        assert b" 405 " in peer.recv(100)


@pytest.mark.parametrize(
    ("accept", "code"),
    [
        ("application/openmetrics-text; version=1.0.0", 200),
        ("application/openmetrics-text; version=x", 400),
        ("text/plain; version=1.x", 400),
        ("anything", 200),
    ],
)
def test_metrics_accept_header(server: HttpServer, accept: str, code: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
        peer.sendall(f"GET /metrics HTTP/1.0\r\nAccept: {accept}\r\n\r\n".encode())
        assert f" {code} ".encode() in peer.recv(100)


def test_slow_endless_or_invalid_request_is_dropped(server: HttpServer) -> None:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
        while time.monotonic() - began < 10:
            try:
                slow.sendall(b"G")  # never silent, never complete
            except OSError:
                break
            assert get(server, "/healthz")[0] == 200
            threading.Event().wait(0.05)
        else:
            pytest.fail("the slow request was not dropped")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as endless:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 3:
                endless.sendall(b"GET / HTTP/1.0\r\n" + b"x: y\r\n" * 1000)
    for invalid in (b"\x16\x03\x01\x02\x00", b"\0" * 100 + b"\n", b"GET /metrics HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
            peer.sendall(invalid)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1000):
                pass
    assert get(server, "/healthz")[0] == 200


def test_silent_connection_is_closed_at_timeout(server: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as silent:
        assert silent.recv(1) == b""


def test_connections_above_limit_are_closed(server: HttpServer) -> None:
    peers = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(100)]
    n_threads = threading.active_count()
    assert n_threads < 90
    for peer in peers:
        peer.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            assert get(server, "/healthz")[0] == 200
            break
        except OSError:
            threading.Event().wait(0.05)


def test_server_port_in_use_is_refused(server: HttpServer, source: Source) -> None:
    options = ("--http-port", "--http-bind")
    with raises(TeacherSetupError, address=f"http://127.0.0.1:{server.port}", options=options):
        HttpServer("127.0.0.1", server.port, source)
    with raises(TeacherSetupError, address="http://no-such-host.invalid:0", options=options):
        HttpServer("no-such-host.invalid", 0, source)


def test_healthz_of_running_proxy_follows_workers() -> None:
    with running_proxy() as proxy, HttpServer("127.0.0.1", 0, lambda: (proxy.latest_status, 0.0)) as server:
        assert health(server)[0] == 503
        with running_worker(proxy.backend_port):
            wait_until(lambda: health(server)[0] == 200)  # the status is refreshed once per second
            code, body = health(server)
            assert code == 200 and body["model_name"] == "fake" and body["workers"] == 1
