"""Process trees of a node: list the descendants of a process, and end them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from recipe_gkd.runtime import scratch
from recipe_gkd.runtime.process_id import ProcessId, boot_id, is_alive, process_id


def tree(pids: Sequence[int]) -> list[ProcessId]:
    """Return these processes and all that they have started; ``start_ticks`` is 0 for one that is gone."""
    found: dict[int, ProcessId] = {}
    for pid in pids:
        members = [pid]
        with suppress(psutil.Error):
            members += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        for member in members:
            if identity := process_id(member):
                found[member] = identity
        found.setdefault(pid, ProcessId(boot_id(), pid, 0))
    return list(found.values())



def end_trees(processes: Sequence[ProcessId], timeout_s: float) -> list[int]:
    """Send SIGKILL to ``processes`` and to descendants of the live ones; return the pids that do not end."""
    alive = [process.pid for process in processes if is_alive(process)]
    return end(list({*processes, *tree(alive)}), 0.0, timeout_s)



def end(processes: Sequence[ProcessId], grace_s: float, timeout_s: float) -> list[int]:
    """Wait ``grace_s`` for them to end, then SIGKILL the rest; pids of those that live on after ``timeout_s``."""
    started = time.monotonic()
    left = _wait(processes, grace_s)
    for process in left:
        with suppress(ProcessLookupError, PermissionError):  # one that may not be ended stays, and is returned
            os.kill(process.pid, signal.SIGKILL)
    left = _wait(left, timeout_s - (time.monotonic() - started))
    for process in set(processes) - set(left):
        scratch.remove_of(process)
    return [process.pid for process in left]



def _wait(processes: Sequence[ProcessId], seconds: float) -> list[ProcessId]:
    """Wait until ``processes``, which need not be children of this one, have ended; return those that have not."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)  # pidfd_open, which could be waited on, is missing in kernels before 5.3, as of RHEL 8
    return left
