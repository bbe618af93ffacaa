"""State of processes."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Return True if a process runs. A zombie, which is only not reaped yet, does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
