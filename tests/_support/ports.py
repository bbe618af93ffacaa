"""Free TCP ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANDOM = random.SystemRandom()
_FIRST = 20_000
"""Above the ports of Ray's workers (10,002 to 19,999)."""
_MIN_PORTS = 1000
"""Ports below the ephemeral range from which a random one is chosen."""


def free_port() -> int:
    """Return a free port that the kernel gives to nobody else between this call and the use of the port.

    Such ports are outside the range for outgoing connections and for servers that leave the choice to the kernel. If
    that range leaves too few (``ip_local_port_range`` of 1024 65535), the kernel chooses the port, and another process
    can be given it in the meantime.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = [_RANDOM.randrange(_FIRST, end) for _ in range(100)] if end > _FIRST + _MIN_PORTS else []
    for port in [*candidates, 0]:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
