"""The clock of all timings: the event loop's."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Seconds on the one clock of all timings: the event loop's."""
    return asyncio.get_running_loop().time()
