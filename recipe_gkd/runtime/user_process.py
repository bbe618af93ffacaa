"""A process that runs a user's code, such as reward functions and environments of conversations.

A pool of multiprocessing or pebble is not used: at the deadline of a call, or when the driver is killed, the whole
process group must end with all processes that the code started, even while C code holds the GIL. Moreover, an error
must show the code's own stack, and the process must neither import the command's module with torch and Ray again nor
lose printed output.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOAD_TIMEOUT_S = 300.0
"""Deadline of the import of the user's file, which may load a model."""
KILL_MARGIN_S = 2.0
"""Time after a deadline at which the process is killed. At the deadline, it writes its stacks and exits by itself."""
END_TIMEOUT_S = 10.0
"""Deadline of the end of a killed process. It usually takes milliseconds."""
EXIT_DELAY_S = 1.0
"""Maximum time between the end of the connection and the end of a dying process."""
SHOWN_STACK_LINES = 20
WATCH_THREAD = re.compile(r"^Thread .*\n  File .* in end_with_driver\n(?:  File .*\n)*\n?", re.MULTILINE)
"""Stack of the thread that does not belong to the user's code."""


@dataclass(frozen=True)
class ProcessEnd:
    """End of a process.

    Attributes:
        kind: ``"timeout"`` or ``"exit"``.
        reason: Reason, as the predicate of a sentence.
        stack: Stacks of its threads. Empty if there are none.
        exit_status: Exit status, or minus the number of the signal. None if the driver ended the process.
    """

    kind: str
    reason: str
    stack: str = ""
    exit_status: int | None = None


class UserProcess:
    """A process that runs a user's code in a separate process group.

    Lifecycle::

        process = UserProcess(Path("child.py"))   # its program calls user_child.run
        process.socket.sendall(...)               # or Connection(process.socket.detach())
        end = process.end(timeout_s, is_late=False)   # after the connection has ended, or at a deadline
        process.close()

    Attributes:
        socket: Connection to the process.
    """

    def __init__(self, program: Path, others: Sequence[int] = (), *, python: str | None = None) -> None:
        """Start the process.

        Args:
            program: Python file.
            others: Further file descriptors for the process.
            python: Path of the interpreter. None for the same one.
        """
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.socket, child_end = socket.socketpair()
        with child_end:
            stderr = os.dup(2)
            try:
                descriptors = child_end.fileno(), self._stacks.fileno(), stderr, *others
                self._process = subprocess.Popen(
                    # -u: the process is killed in the end, which would lose buffered output.
                    [python or sys.executable, "-P", "-u", str(program), *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    stderr=self._stacks,  # until the interpreter has started
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C must reach only the driver. The group ends as a whole.
                )
            finally:
                os.close(stderr)

    @staticmethod
    def import_path() -> list[str]:
        """Return ``sys.path`` for the process, whose working directory may change."""
        return [entry or os.getcwd() for entry in sys.path]

    def kill(self) -> None:
        """Kill the process and all processes that it has started. Safe in any thread."""
        if self._process.returncode is None:  # Until the process is reaped, its pid cannot be reused.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and release its files."""
        self.kill()
        self._process.wait(END_TIMEOUT_S)
        self.socket.close()
        self._stacks.close()

    def is_dead(self) -> bool:
        """Return True if the process has ended. Do not reap it, so that the pid of its group is not reused."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # Other code has reaped it.
            return True

    def end(self, timeout_s: float, *, is_late: bool) -> ProcessEnd:
        """End a process that does not answer, and return the reason. It may block for about a second.

        Args:
            timeout_s: Deadline that applied.
            is_late: True if the deadline has passed, False if the connection has ended.
        """
        deadline = time.monotonic() + EXIT_DELAY_S
        while not (is_late or self.is_dead()) and time.monotonic() < deadline:
            time.sleep(0.01)  # No system call waits with a deadline without reaping the process.
        died = self.is_dead()
        self.kill()
        status = self._process.wait(END_TIMEOUT_S)
        text = os.pread(self._stacks.fileno(), 1 << 16, 0).decode(errors="replace")
        stack = "\n".join(WATCH_THREAD.sub("", text).splitlines()[:SHOWN_STACK_LINES])
        if stack.startswith("Timeout") or (is_late and not died):
            return ProcessEnd(
                "timeout", f"took longer than {timeout_s:g} s and was ended{', here:' if stack else ''}", stack
            )
        if not died:
            return ProcessEnd("exit", "closed the connection to the driver, and was ended")
        if status == -signal.SIGKILL:
            reason = "was killed (SIGKILL): the kernel's log shows if it was killed because it was out of memory"
            return ProcessEnd("exit", reason, exit_status=status)
        exit_description = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        return ProcessEnd("exit", f"ended its process ({exit_description})", stack, exit_status=status)
