"""Free TCP ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANDOM = random.SystemRandom()
_FIRST_PORT = 20_000  # Ray's workers use 10,002 to 19,999.
_MIN_CANDIDATES = 1000  # With fewer ports below the ephemeral range, two tests would often choose the same one.


def free_port() -> int:
    """Return a free TCP port that the kernel does not assign to another process before the test uses it.

    The port is below the kernel's ephemeral range, which serves outgoing connections and servers that bind port 0. If
    the range leaves too few ports (such as ``ip_local_port_range`` of 1024 to 65535), the kernel chooses the port, and
    another process may receive the same one.

    Raises:
        OSError: No port is free.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    has_enough = end > _FIRST_PORT + _MIN_CANDIDATES
    candidates = [_RANDOM.randrange(_FIRST_PORT, end) for _ in range(100)] if has_enough else []
    for port in [*candidates, 0]:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
