"""Free TCP ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANDOM = random.SystemRandom()
_FIRST = 20_000
"""Above the ports of Ray's workers (10,002 to 19,999)."""


def free_port() -> int:
    """Return a free port that the kernel gives to nobody else between this call and the use of the port.

    Such ports are outside the range for outgoing connections and for servers that leave the choice to the kernel.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert end > _FIRST + 1000, f"all ports above {end} are ephemeral; tests need some from {_FIRST} on that are not"
    for _ in range(100):
        port = _RANDOM.randrange(_FIRST, end)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port found from {_FIRST} to {end}")
