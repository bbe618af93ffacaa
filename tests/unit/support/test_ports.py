"""Free ports: on hosts with a normal and with a maximal ephemeral range, and in several test processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests._support import ports
from tests._support.ports import free_port


@pytest.mark.parametrize(
    ("ephemeral", "lowest", "highest"), [("32768\t60999", 20000, 32767), ("1024\t65535", 1024, 65535)]
)
def test_free_port_is_below_ephemeral_range_if_possible(
    monkeypatch: pytest.MonkeyPatch, ephemeral: str, lowest: int, highest: int
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: ephemeral)
    port = free_port()
    assert lowest <= port <= highest
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_processes_share_no_port_and_no_port_of_a_proxys_http_server(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    for number in range(2):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
        ports._blocks.cache_clear()
        for _ in range(100):
            first = free_port()
            used += first, first + 2
    ports._blocks.cache_clear()
    assert len(set(used)) == 400


@pytest.mark.parametrize("offset", range(4))
def test_block_with_a_used_port_is_passed_over(offset: int) -> None:
    distance = 4 * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first, second = free_port(), free_port()
    if second != first + distance:
        pytest.skip("the range ends, or another process uses a port of it")
    with socket.create_server(("127.0.0.1", second + distance + offset)):
        assert free_port() > second + distance + offset
