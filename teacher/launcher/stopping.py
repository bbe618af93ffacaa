"""The end of recorded processes: SIGTERM, a wait, and SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from teacher.errors import TeacherError
from teacher.launcher.pid_files import PidFile
from teacher.launcher.stop_requests import StopRequests

POLL_S = 0.1
_KILL_TIMEOUT_S = 5.0


def stop_processes(
    files: Sequence[PidFile], timeout_s: float, requests: StopRequests, report: Callable[[str], None]
) -> None:
    """Stop processes, and remove their files except for logs. A signal to this process ends only the wait.

    Args:
        files: Their pid files.
        timeout_s: Time between SIGTERM and SIGKILL.
        requests: Signals to this process.
        report: Function that writes a line to stderr.

    Raises:
        TeacherError: Processes are still running after SIGKILL.
    """
    began, n_requests = time.monotonic(), len(requests.numbers)
    for file in files:
        # Only the leader gets it, and ends its own children.
        if file.process and file.is_alive():
            with suppress(OSError):
                os.kill(file.process.pid, signal.SIGTERM)
    _wait(files, timeout_s, lambda: len(requests.numbers) > n_requests)
    if any(file.is_running() for file in files):
        report(f"still running after {time.monotonic() - began:.0f} s, killing")
        for file in files:
            if file.process and file.is_running():
                with suppress(OSError):
                    os.killpg(file.process.pid, signal.SIGKILL)
        _wait(files, _KILL_TIMEOUT_S, lambda: False)
        if remaining := [str(file.path) for file in files if file.is_running()]:
            raise TeacherError(f"could not stop the processes recorded in {' '.join(remaining)}")
    for file in files:
        for path in (file.path, file.path.with_suffix(".ready")):
            path.unlink(missing_ok=True)


def _wait(files: Sequence[PidFile], timeout_s: float, is_interrupted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while any(file.is_running() for file in files) and time.monotonic() < deadline and not is_interrupted():
        time.sleep(POLL_S)
