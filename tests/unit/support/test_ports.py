"""Ports for the servers of tests, on hosts with any range of ephemeral ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests._support.ports import free_port


@pytest.mark.parametrize(
    ("ephemeral", "lowest", "highest"), [("32768\t60999", 20000, 32767), ("1024\t65535", 1024, 65535)]
)
def test_a_port_is_outside_the_ephemeral_range_if_that_leaves_some(
    monkeypatch: pytest.MonkeyPatch, ephemeral: str, lowest: int, highest: int
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: ephemeral)
    port = free_port()
    assert lowest <= port <= highest
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
