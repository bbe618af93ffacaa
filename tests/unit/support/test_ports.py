"""Free ports on hosts with a normal and with a maximal ephemeral range."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

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
