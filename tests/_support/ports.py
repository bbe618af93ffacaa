"""Free TCP ports for servers that tests start."""

from __future__ import annotations

import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FIRST_PORT = 20_000  # Ray's workers use 10,002 to 19,999.
_BLOCK = 4  # A proxy also listens on the port two above the one that it is given.
_MIN_BLOCKS = 250  # With fewer ports below the ephemeral range, a test soon gets the ports of an earlier one.


def free_port() -> int:
    """Return a free TCP port that no other process uses before the test does.

    The port and the three above it belong to the caller: each process of pytest-xdist has its part of the range, and
    goes through it from a random place. The range is below the kernel's ephemeral range, which serves outgoing
    connections and servers that bind port 0. If that leaves too few ports (such as ``ip_local_port_range`` of 1024 to
    65535), the kernel chooses the port, and another process may receive the same one.

    Raises:
        OSError: No port is free.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for first in itertools.chain(itertools.islice(_blocks(end), _MIN_BLOCKS), [0]):
        with suppress(OSError):
            for port in range(first, first + _BLOCK) if first else ():
                _bound_port(port)
            return _bound_port(first)
    raise OSError("no port is free")


@functools.cache
def _blocks(end: int) -> Iterator[int]:
    """Return an endless iterator over the first ports of this process's blocks below ``end``."""
    blocks = range(_FIRST_PORT, end - _BLOCK + 1, _BLOCK)
    if len(blocks) < _MIN_BLOCKS:
        return iter(())
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = blocks[number :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    return itertools.islice(itertools.cycle(own), random.SystemRandom().randrange(len(own)), None)


def _bound_port(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])
