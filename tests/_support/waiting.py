"""Waits for conditions, with a time limit.

A limit that a test examines is a number in the test.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

PATIENCE_S = 900.0
"""Limit of waits for what must come: more than the slowest machine needs, half of pytest's limit for one test."""
FOREVER_S = 3600.0
"""Longer than a test may take, so that no test passes by waiting for it. Sleeping processes of tests sleep as long."""


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return once the condition is true. Fail if it is not true within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true within {timeout_s:g} s"
        threading.Event().wait(0.02)


async def wait_until_async(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return once the condition is true, without blocking the event loop."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
