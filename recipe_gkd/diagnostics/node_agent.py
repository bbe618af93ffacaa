"""What is done on the node where workers run, from outside their processes: look into them, end them.

Plain functions on process ids that need no Ray; :mod:`.processes` runs them on the right node.
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
_TAIL_BYTES = 16_384
_MAX_DUMP_BYTES = 64 << 20
_LATE_S = 0.4
"""Time after the deadline that stacks may take: the second attempt at them gets at least 0.2 s."""


@dataclass
class ProcessReport:
    """One process: its ``state`` for people, resident memory, and the Python stacks of all its threads."""

    pid: int
    name: str
    state: str
    memory_bytes: int
    stacks: str


@dataclass
class WorkerReport:
    """The worker's own process comes first, then its children, such as the ranks of a tensor-parallel engine."""

    processes: list[ProcessReport]
    logs: str = ""
    nccl_dumps: dict[str, bytes] = field(default_factory=dict)


def inspect(pids: Sequence[int], log_dir: str, timeout_s: float) -> dict[int, WorkerReport]:
    """Look into each of ``pids`` and its children, all at once; ends in ``timeout_s`` with what it has got by then."""
    deadline = time.monotonic() + timeout_s
    asked = {dump: before for pid in pids for dump, before in _ask_for_nccl_dumps(pid).items()}
    trees = {pid: [pid, *(child.pid for child in tree([pid]) if child.pid != pid)] for pid in pids}
    members = [member for tree in trees.values() for member in tree]
    # In threads that are left behind: of a process that hangs in the kernel, even reading /proc can hang.
    looks = run_until(deadline + _LATE_S, [partial(_inspect_process, member, deadline) for member in members])
    reports = {
        member: report or ProcessReport(member, "", UNREADABLE, 0, "")
        for member, report in zip(members, looks, strict=True)
    }
    _wait_for_dumps(asked, deadline)
    return {
        pid: WorkerReport([reports[member] for member in trees[pid]], _logs(pid, Path(log_dir)), _dumps(pid))
        for pid in pids
    }


def inspect_here(pids: Sequence[int], timeout_s: float) -> dict[int, WorkerReport]:
    """To be run on a node: look into its workers."""
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
    """By py-spy; it can wait for a consistent moment unless the process is frozen. Else by faulthandler."""
    py_spy, failures = Path(sys.executable).with_name("py-spy"), []
    ways: list[list[str]] = [["--nonblocking"], []] if frozen else [[], ["--nonblocking"]]
    for i, way in enumerate(ways):
        left = deadline - time.monotonic()
        try:
            done = subprocess.run(
                [py_spy, "dump", *way, "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=max(0.1, left if i else left * 0.6),
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
    """Of a process that called :func:`allow_stack_dumps`: SIGUSR1 would end any other."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        file = stack_dumps.stack_dump_file(pid)
        if file is None or not caught & 1 << (signal.SIGUSR1 - 1):
            return ""
        before = file.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        deadline, size = max(deadline, time.monotonic() + 0.2), -1
        while time.monotonic() < deadline:  # written in many small parts, by a signal handler that cannot tell its end
            time.sleep(0.05)
            if size == (size := file.stat().st_size) > before:
                break
        with open(file) as text:
            text.seek(before)
            return text.read()
    except (OSError, ValueError, IndexError):
        return ""


def _logs(pid: int, log_dir: Path) -> str:
    """The ends of Ray's log files of a worker."""
    parts = []
    for file in sorted([*log_dir.glob(f"worker-*-{pid}.*"), *log_dir.glob(f"python-core-worker-*_{pid}.log")]):
        with suppress(OSError), open(file, "rb") as log:
            log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            if tail := log.read().decode(errors="replace"):
                parts.append(f"==> {file} <==\n{tail}\n")
    return "".join(parts)


def _ask_for_nccl_dumps(pid: int) -> dict[Path, float]:
    """Write to the recorder's pipes of a worker and its children; the dumps to come, and their time before that."""
    asked = {}
    for pipe in _nccl_files(pid, ".pipe"):
        dump = pipe.with_suffix("")
        before = dump.stat().st_mtime if dump.exists() else 0.0
        with suppress(OSError):  # no reader: the process is gone
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            os.write(descriptor, b"1")
            os.close(descriptor)
            asked[dump] = before
    return asked


def _wait_for_dumps(asked: dict[Path, float], deadline: float) -> None:
    """Wait until all these dumps are newer than given and grow no more; NCCL's monitor reads its pipe once a second."""
    sizes: list[int] = []
    while asked and time.monotonic() < deadline:
        time.sleep(0.05)  # another process writes them, and tells nobody when it has
        found = [dump.stat() if dump.exists() else None for dump in asked]
        is_new = all(now and now.st_mtime > before for now, before in zip(found, asked.values(), strict=True))
        if is_new and sizes == (sizes := [now.st_size for now in found if now]):
            return


def _dumps(pid: int) -> dict[str, bytes]:
    """Read the dumps of a worker, those that it has written of its own accord, too."""
    return {
        dump.name: dump.read_bytes()
        for dump in _nccl_files(pid)
        if dump.is_file() and dump.stat().st_size <= _MAX_DUMP_BYTES
    }


def _nccl_files(pid: int, suffix: str = "") -> list[Path]:
    """Return the files of NCCL's flight recorder in the scratch folders of a worker."""
    return [file for folder in scratch.folders_of(pid) for file in folder.glob(f"{stack_dumps.NCCL_FILES}*{suffix}")]
