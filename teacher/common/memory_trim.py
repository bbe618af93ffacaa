"""Return of freed memory to the operating system.

glibc keeps freed memory that lies between blocks in use. Tensors of many sizes leave more and more of it.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

TRIM_EVERY_S = 60.0
"""Time between two calls of ``malloc_trim``, which reads the whole heap."""


class MemoryTrimmer:
    """Returns freed memory of this process at intervals.

    Example::

        trimmer = MemoryTrimmer()
        while True:
            step()
            trimmer.trim_if_due()
    """

    def __init__(self) -> None:
        self._trimmed_at = time.monotonic()

    def trim_if_due(self) -> bool:
        """Return freed memory if the last time was :data:`TRIM_EVERY_S` ago. Return True if it was due."""
        is_due = time.monotonic() - self._trimmed_at >= TRIM_EVERY_S
        if is_due:
            trim()
            self._trimmed_at = time.monotonic()
        return is_due


def trim() -> None:
    """Return freed memory. Does nothing with another C library than glibc."""
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
