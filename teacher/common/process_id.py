"""Identity of a process that is unique across clock steps, reboots and reuse of the pid."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process of one boot of one machine.

    Attributes:
        boot_id: Kernel's random id of the boot, as in ``/proc/sys/kernel/random/boot_id``.
        pid: Process id in the pid namespace of the reader.
        start_ticks: Clock ticks from boot to the start of the process, field 22 of ``/proc/<pid>/stat``. Independent
            of the wall clock, unlike ``psutil.Process.create_time``.
    """

    boot_id: str
    pid: int
    start_ticks: int


@cache
def boot_id() -> str:
    """Return the id of this machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_id(pid: int) -> ProcessId | None:
    """Return the identity of process ``pid`` on this machine, or None if there is no such process."""
    stat = _stat(pid)
    return None if stat is None else ProcessId(boot_id(), pid, int(stat[19]))


def is_alive(process: ProcessId) -> bool:
    """Return True if ``process`` runs on this machine. A zombie has ended."""
    stat = _stat(process.pid)
    return (
        process.boot_id == boot_id()
        and stat is not None
        and int(stat[19]) == process.start_ticks
        and stat[0] not in ("Z", "X", "x")
    )


def age_s(process: ProcessId) -> float:
    """Return the time since the start of a process of this boot, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` from field 3 (state) on; field N is at index N - 3."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # field 2 is the name in parentheses, which may contain parentheses
