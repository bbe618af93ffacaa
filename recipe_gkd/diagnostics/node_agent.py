"""Inspection of worker processes on their node: state, Python stacks, log files, dumps of NCCL's flight recorder.

Everything works from outside the inspected processes, which may hang. :func:`inspect` needs no connection
to Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from ray._private import worker as ray_worker

from recipe_gkd.diagnostics import stack_dumps
from recipe_gkd.runtime import scratch
from recipe_gkd.runtime.process_trees import tree
from recipe_gkd.runtime.threads import run_until

GONE = "gone"
UNREADABLE = "unknown: the kernel did not describe it in time"
_STATES = {
    psutil.STATUS_SLEEPING: "waiting",
    psutil.STATUS_IDLE: "waiting",
    psutil.STATUS_STOPPED: "stopped (SIGSTOP?)",
    psutil.STATUS_TRACING_STOP: "stopped (by a debugger)",
    psutil.STATUS_DISK_SLEEP: "uninterruptible (in the kernel: a disk, a driver)",
    psutil.STATUS_ZOMBIE: "zombie",
}
_FROZEN = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)
_LOG_TAIL_BYTES = 16_384
_MAX_DUMP_BYTES = 64 << 20
_LATE_STACKS_S = 0.4
"""Time after the deadline that stacks may take. The faulthandler fallback gets at least 0.2 s."""


@dataclass
class ProcessReport:
    """State of one process.

    Attributes:
        pid: Process id.
        name: Start of the command line. Empty if the process is gone.
        state: Readable description of the state.
        memory_bytes: Resident memory.
        stacks: Python stacks of all threads, as text.
    """

    pid: int
    name: str
    state: str
    memory_bytes: int
    stacks: str


@dataclass
class WorkerReport:
    """State of one worker.

    Attributes:
        processes: The worker's own process, then its children, such as the ranks of a tensor-parallel engine.
        logs: Ends of Ray's log files of the worker.
        nccl_dumps: Name of a dump of NCCL's flight recorder -> its content.
    """

    processes: list[ProcessReport]
    logs: str = ""
    nccl_dumps: dict[str, bytes] = field(default_factory=dict)


def inspect(pids: Sequence[int], log_dir: str, timeout_s: float) -> dict[int, WorkerReport]:
    """Inspect workers of this node with their children, all at the same time.

    Args:
        pids: Processes of the workers.
        log_dir: Folder of Ray's log files.
        timeout_s: Deadline. Parts that are not available by then are left out.

    Returns:
        Pid -> report.
    """
    deadline = time.monotonic() + timeout_s
    requested = {dump: before for pid in pids for dump, before in _request_nccl_dumps(pid).items()}
    trees = {pid: [pid, *(child.pid for child in tree([pid]) if child.pid != pid)] for pid in pids}
    members = [member for tree in trees.values() for member in tree]
    # In abandoned threads, because reading /proc can hang if the process hangs in the kernel.
    found = run_until(deadline + _LATE_STACKS_S, [partial(_inspect_process, member, deadline) for member in members])
    reports = {
        member: report or ProcessReport(member, "", UNREADABLE, 0, "")
        for member, report in zip(members, found, strict=True)
    }
    _wait_for_dumps(requested, deadline)
    return {
        pid: WorkerReport([reports[member] for member in trees[pid]], _logs(pid, Path(log_dir)), _read_dumps(pid))
        for pid in pids
    }


def inspect_workers(pids: Sequence[int], timeout_s: float) -> dict[int, WorkerReport]:
    """Inspect workers of this Ray node. Arguments and result: see :func:`inspect`."""
    node: Any = ray_worker._global_node
    return inspect(pids, node.get_logs_dir_path(), timeout_s)


def _inspect_process(pid: int, deadline: float) -> ProcessReport:
    try:
        process = psutil.Process(pid)
        status = process.status()
        name = " ".join(" ".join(process.cmdline()).split())[:80] or process.name()
        report = ProcessReport(pid, name, _STATES.get(status, status), process.memory_info().rss, "")
    except psutil.Error:
        return ProcessReport(pid, "", GONE, 0, "")
    if status != psutil.STATUS_ZOMBIE:
        report.stacks = _stacks(pid, frozen=status in _FROZEN, deadline=deadline)
    return report


def _stacks(pid: int, *, frozen: bool, deadline: float) -> str:
    """Return the Python stacks of a process by py-spy, or by faulthandler if py-spy fails."""
    py_spy, failures = Path(sys.executable).with_name("py-spy"), []
    # py-spy pauses the process for a consistent stack. A frozen process cannot be paused.
    modes: list[list[str]] = [["--nonblocking"], []] if frozen else [[], ["--nonblocking"]]
    for i, mode in enumerate(modes):
        left_s = deadline - time.monotonic()
        try:
            done = subprocess.run(
                [py_spy, "dump", *mode, "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=max(0.1, left_s if i else left_s * 0.6),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(str(error))
            continue
        if done.returncode == 0 and "Thread" in done.stdout:
            return done.stdout
        failures.append(" ".join((done.stderr or "no threads").split())[:300])
    written = "" if frozen else _faulthandler_stacks(pid, deadline)
    return written or "py-spy: " + "\npy-spy: ".join(failures) + "\n"


def _faulthandler_stacks(pid: int, deadline: float) -> str:
    """Make a process write its own stacks, and return them.

    Only for processes that have called :func:`~recipe_gkd.diagnostics.stack_dumps.allow_stack_dumps`. SIGUSR1 would end
    any other process, so the result is empty then.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        file = stack_dumps.stack_dump_file(pid)
        if file is None or not caught & 1 << (signal.SIGUSR1 - 1):
            return ""
        size_before = file.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        deadline, size = max(deadline, time.monotonic() + 0.2), -1
        # The signal handler writes in many small parts and cannot signal its end.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if size == (size := file.stat().st_size) > size_before:
                break
        with open(file) as text:
            text.seek(size_before)
            return text.read()
    except (OSError, ValueError, IndexError):
        return ""


def _logs(pid: int, log_dir: Path) -> str:
    """Return the ends of Ray's log files of a worker."""
    parts = []
    for file in sorted([*log_dir.glob(f"worker-*-{pid}.*"), *log_dir.glob(f"python-core-worker-*_{pid}.log")]):
        with suppress(OSError), open(file, "rb") as log:
            log.seek(max(0, file.stat().st_size - _LOG_TAIL_BYTES))
            if tail := log.read().decode(errors="replace"):
                parts.append(f"==> {file} <==\n{tail}\n")
    return "".join(parts)


def _request_nccl_dumps(pid: int) -> dict[Path, float]:
    """Request dumps from the flight recorders of a worker and its children, by their pipes.

    Returns:
        File of a requested dump -> its modification time before the request, 0 if it did not exist.
    """
    requested = {}
    for pipe in _nccl_files(pid, ".pipe"):
        dump = pipe.with_suffix("")
        before = dump.stat().st_mtime if dump.exists() else 0.0
        with suppress(OSError):  # The pipe has no reader if the process is gone.
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            os.write(descriptor, b"1")
            os.close(descriptor)
            requested[dump] = before
    return requested


def _wait_for_dumps(requested: dict[Path, float], deadline: float) -> None:
    """Wait until all requested dumps are new and have stopped growing. NCCL reads its pipes once per second."""
    sizes: list[int] = []
    while requested and time.monotonic() < deadline:
        time.sleep(0.05)  # Another process writes the files and does not signal the end.
        found = [dump.stat() if dump.exists() else None for dump in requested]
        are_new = all(now and now.st_mtime > before for now, before in zip(found, requested.values(), strict=True))
        if are_new and sizes == (sizes := [now.st_size for now in found if now]):
            return


def _read_dumps(pid: int) -> dict[str, bytes]:
    """Return name -> content of all dumps of a worker, including those that NCCL wrote without a request."""
    return {
        dump.name: dump.read_bytes()
        for dump in _nccl_files(pid)
        if dump.is_file() and dump.stat().st_size <= _MAX_DUMP_BYTES
    }


def _nccl_files(pid: int, suffix: str = "") -> list[Path]:
    """Return the files of NCCL's flight recorder in the scratch folders of a worker."""
    return [file for folder in scratch.folders_of(pid) for file in folder.glob(f"{stack_dumps.NCCL_PREFIX}*{suffix}")]
