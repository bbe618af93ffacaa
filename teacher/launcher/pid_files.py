"""Pid files of a run folder: ``pid start-ticks boot-id host``.

Start ticks and boot id distinguish a process from a later one with the same pid, the host from a process of another
machine that shares the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from teacher.common.process_id import ProcessId, boot_id, is_alive, process_id

HOST = os.uname().nodename


@dataclass(frozen=True)
class PidFile:
    """Pid file, and the process that it names.

    Attributes:
        path: The file.
        process: The process. It may have ended.
        foreign: Reason why this host must leave the file and its process alone. Empty if they are ours.
    """

    path: Path
    process: ProcessId | None
    foreign: str = ""

    @property
    def name(self) -> str:
        """Name of the process, such as ``worker-0``."""
        return self.path.stem

    def is_alive(self) -> bool:
        """Return True if the process itself runs."""
        return self.process is not None and is_alive(self.process)

    def is_running(self) -> bool:
        """Return True if the process or, after its end, a process of its group runs."""
        return self.is_alive() or self._has_group()

    def _has_group(self) -> bool:
        """Return True if the leader has ended and its group has a live member.

        The kernel does not reuse the number while the group has members. If a live process has the pid now, it is
        unrelated, and our group was empty. An unrelated process may also have created a group of this number and
        ended. So only a member that writes to our log counts.
        """
        if self.process is None or self.process.boot_id != boot_id():
            return False
        now = process_id(self.process.pid)
        if now is not None and is_alive(now):
            return False
        try:
            os.killpg(self.process.pid, 0)
        except OSError:
            return False
        log = os.path.realpath(self.path.parent) + f"/{self.name}.log"
        return any(output.removesuffix(" (deleted)") == log for output in _error_outputs(self.process.pid))


def _error_outputs(group: int) -> Iterator[str]:
    """Yield the file behind stderr of each process of a group. A zombie has none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                yield os.readlink(folder / "fd" / "2")


def read_pid_files(run_dir: Path) -> tuple[list[PidFile], list[PidFile]]:
    """Return the pid files of a folder that this host wrote, and all others."""
    paths = sorted(path for path in run_dir.glob("*.pid") if not path.name.startswith(".") and path.exists())
    files = [read_pid_file(path) for path in paths]
    return [file for file in files if not file.foreign], [file for file in files if file.foreign]


def read_pid_file(path: Path) -> PidFile:
    """Read a pid file. An unreadable one is foreign."""
    try:
        line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        line = ""
    pid, started, boot, host = (*line.split(None, 3), "", "", "", "")[:4]
    if not (re.fullmatch("[0-9]{1,10}", pid) and int(pid) > 1 and re.fullmatch("[0-9]{1,18}", started)):
        return PidFile(
            path,
            None,
            "it is empty or damaged, expected 'pid start-ticks boot-id host'; if no process has "
            f"{path.with_suffix('.ready')} in its command line (ps axww), remove the file",
        )
    process = ProcessId(boot or boot_id(), int(pid), int(started))
    if is_alive(process):
        return PidFile(path, process)
    if not boot:
        reason = f"it names no host (an older version wrote it) and pid {pid} on this host is not that process; end "
        return PidFile(path, None, reason + "that process if it still runs on another host, and remove the file")
    if host.rstrip() != HOST:
        reason = f"pid {pid} is of host {host}, this is {HOST}; run teacher/stop_server.sh --run-dir {path.parent} "
        return PidFile(path, None, reason + "there, or remove the file if that machine is gone")
    return PidFile(path, process)


def write_pid_file(path: Path, pid: int) -> PidFile:
    """Write the file of a child process, completely or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    process = process_id(pid)
    if process is None:
        raise ProcessLookupError(f"no process {pid}")
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        with open(part, "x", encoding="ascii") as file:
            file.write(f"{pid} {process.start_ticks} {process.boot_id} {HOST}\n")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return PidFile(path, process)
