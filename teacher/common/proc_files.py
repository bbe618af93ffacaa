"""Memory counters of Linux."""

from __future__ import annotations

import re
from pathlib import Path

from teacher.common.sizes import KIB

STATUS, MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")


def read_bytes(file: Path, name: str) -> int | None:
    """Return a counter in bytes; None if the file or the counter does not exist.

    Args:
        file: File with lines such as ``VmRSS:  12 kB``.
        name: Name of the counter, such as ``VmRSS`` or ``VmHWM`` of ``STATUS``, or ``MemAvailable`` of ``MEMINFO``.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * KIB if match else None
