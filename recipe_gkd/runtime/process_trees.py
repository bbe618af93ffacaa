"""Process trees of this node: list the descendants of processes, and kill them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from recipe_gkd.runtime import scratch
from teacher.common.process_id import ProcessId, age_s, boot_id, is_alive, process_id


def tree(pids: Sequence[int]) -> list[ProcessId]:
    """Return the processes ``pids`` and all their descendants. A process that has ended has ``start_ticks`` 0."""
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


def kill_trees(processes: Sequence[ProcessId], timeout_s: float) -> list[int]:
    """Kill ``processes`` and all descendants of the processes that still run.

    Returns:
        Pids of the processes that still run after ``timeout_s``.
    """
    alive = [process.pid for process in processes if is_alive(process)]
    return end(list({*processes, *tree(alive)}), 0.0, timeout_s)


def kill_older(pid: int, than_s: float, timeout_s: float) -> bool:
    """Kill process ``pid`` and its descendants if it has run for longer than ``than_s``. Return True if it has."""
    process = process_id(pid)
    if process is None or not is_alive(process) or age_s(process) <= than_s:
        return False
    kill_trees(tree([pid]), timeout_s)
    return True


def end(processes: Sequence[ProcessId], grace_s: float, timeout_s: float) -> list[int]:
    """Wait until processes have ended, and kill those that still run after a grace period.

    The scratch folders of ended processes are removed.

    Args:
        processes: Processes of this node. They need not be children of this process.
        grace_s: Time to exit before SIGKILL.
        timeout_s: Deadline, including the grace period.

    Returns:
        Pids of the processes that still run after ``timeout_s``.
    """
    started = time.monotonic()
    alive = _wait(processes, grace_s)
    for process in alive:
        with suppress(ProcessLookupError, PermissionError):  # A process of another user is returned as still running.
            os.kill(process.pid, signal.SIGKILL)
    alive = _wait(alive, timeout_s - (time.monotonic() - started))
    for process in set(processes) - set(alive):
        scratch.remove_folders_of(process)
    return [process.pid for process in alive]


def _wait(processes: Sequence[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until ``processes`` have ended. Return those that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)  # pidfd_open, which could be waited for, needs kernel 5.3. RHEL 8 has 4.18.
    return alive
