"""Waits for conditions, with a time limit.

PATIENCE_S is the time limit of a wait for something that must come: the slowest machine needs less, and pytest's limit
for one test is three times as long. It costs nothing where the tests pass. A limit that a test examines is a number.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

PATIENCE_S = 600.0


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
