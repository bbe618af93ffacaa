"""Run a shell script after this process has ended, even if it was killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

from recipe_gkd.runtime.process_id import ProcessId

KILL_GRACE_S = 5
"""Time that processes get to end by themselves before :func:`kill_after_this_process` ends them."""
_WAIT = """
exec 3<&0
(
  read -r _ <&3
  %s
) >/dev/null 2>&1 &
"""
_KILL = """
  sleep "$1"
  shift
  for process; do
    stat=$(cat "/proc/${process%:*}/stat") || continue
    set -- ${stat##*) }
    [ "${20}" = "${process#*:}" ] && kill -KILL "${process%:*}"
  done
"""


def run_after_this_process(script: str, *arguments: str) -> None:
    """Run ``script`` with ``sh`` and ``arguments`` (``$1``, ...) after this process has ended.

    The waiting process, the janitor, reads from a pipe that only this process holds open. It is no child of this
    process, so that what ends this process and its children, such as Ray, does not end the janitor.
    """
    janitors_end, _held_open = os.pipe()  # the second is closed by the end of this process only
    try:
        subprocess.run(
            ["sh", "-c", _WAIT % script, "sh", *arguments],
            stdin=janitors_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
            timeout=30,
        )
    finally:
        os.close(janitors_end)


def kill_after_this_process(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL to those of ``processes`` that still live :data:`KILL_GRACE_S` after the end of this process."""
    run_after_this_process(_KILL, str(KILL_GRACE_S), *(f"{process.pid}:{process.start_ticks}" for process in processes))
