"""Watchdog for engine calls that hang."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stall_watchdog(timeout_s: float | None) -> Iterator[None]:
    """End the process if the body takes longer than a time limit, with the stacks of all threads on stderr.

    The watchdog is a C thread: it works without the GIL, and while the engine never returns.

    Args:
        timeout_s: Time limit in seconds, None for no limit.
    """
    if timeout_s is None:
        yield
        return
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
