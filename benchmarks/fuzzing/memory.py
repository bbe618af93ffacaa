"""Resident memory of a process, and its peak (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from pathlib import Path

_RESET_PEAK = b"5"  # of /proc/PID/clear_refs, see proc(5)
_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")


class PeakMemory:
    """Measurement of the memory that one call allocates.

    Lifecycle::

        peak = PeakMemory()
        peak.reset()
        grown = peak.grown_bytes()  # since the reset, also if it was freed since
    """

    def __init__(self) -> None:
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._before_bytes = 0

    def reset(self) -> None:
        """Set the peak to the present size."""
        os.pwrite(self._clear, _RESET_PEAK, 0)
        self._before_bytes = self._peak_bytes()

    def grown_bytes(self) -> int:
        """Return the growth of the peak since ``reset``, in bytes."""
        return self._peak_bytes() - self._before_bytes

    def _peak_bytes(self) -> int:
        found = _PEAK.search(os.pread(self._status, 4096, 0))
        assert found is not None
        return int(found[1]) << 10

    def close(self) -> None:
        """Close the files."""
        os.close(self._clear)
        os.close(self._status)


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, 0 after its end.

    Args:
        pid: Process. None for this one, of which memory without a use is freed first.
    """
    if pid is None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # large inputs leave gaps in the heap
    try:
        n_pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return n_pages * os.sysconf("SC_PAGE_SIZE")
