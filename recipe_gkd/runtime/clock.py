"""Clock of all timings: the time of the event loop, which tests replace by a virtual one."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Return the time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
