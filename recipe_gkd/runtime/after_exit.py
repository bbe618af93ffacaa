"""Run a shell script after this process has ended, even if it was killed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

from teacher.common.process_id import ProcessId

KILL_GRACE_S = 5
"""Time that processes get to exit before :func:`kill_after_this_process` kills them."""
_WAIT = """
exec 3<&0
(
  read -r _ <&3
  %s
) >/dev/null 2>&1 &
"""
_KILL = """
  sleep "$1"
  pattern=$2
  shift 2
  for process; do
    stat=$(cat "/proc/${process%:*}/stat") || continue
    set -- ${stat##*) }
    [ "${20}" = "${process#*:}" ] && kill -KILL "${process%:*}"
  done
  [ -z "$pattern" ] || for file in $(grep -ls -e "$pattern" /proc/[0-9]*/cmdline); do
    pid=${file#/proc/}
    kill -KILL "${pid%/*}"
  done
"""


def run_after_this_process(script: str, *arguments: str) -> None:
    """Run a shell script after this process has ended.

    A watcher process reads from a pipe that only this process holds open. The watcher is not a child of this process.
    Code that ends this process with its children, such as Ray's, therefore does not end the watcher.

    Args:
        script: Script for ``sh``.
        *arguments: Its arguments ``$1``, ``$2``, ...
    """
    read_end, _write_end = os.pipe()  # Only the end of this process closes the write end.
    try:
        subprocess.run(
            ["sh", "-c", _WAIT % script, "sh", *arguments],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
            timeout=30,
        )
    finally:
        os.close(read_end)


def kill_after_this_process(processes: Iterable[ProcessId], argument: str = "") -> None:
    """Kill the processes that still run :data:`KILL_GRACE_S` after the end of this process.

    Args:
        argument: Part of the command line of further processes, which may start later.
    """
    pattern = re.sub(r"([][.*^$\\])", r"\\\1", argument[1:])
    pattern = argument and f"[{argument[0]}]{pattern}"  # so that the watcher's own command line has no match
    identities = (f"{process.pid}:{process.start_ticks}" for process in processes)
    run_after_this_process(_KILL, str(KILL_GRACE_S), pattern, *identities)
