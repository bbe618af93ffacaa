"""Waits for conditions, with a time limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once the condition is true. Fail if it is not true within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true within {timeout_s:g} s"
        threading.Event().wait(0.02)


async def wait_until_async(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once the condition is true, without blocking the event loop."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
