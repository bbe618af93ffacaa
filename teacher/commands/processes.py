"""Arguments of the processes of a service that a launcher or supervisor starts."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from teacher.commands.arguments import positive
from teacher.errors import TeacherSetupError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def add_process(parser: argparse.ArgumentParser, ready_text: str) -> None:
    """Add ``--ready-file`` with a help text, and ``--end-with-parent``."""
    parser.add_argument("--ready-file", default="", help=ready_text)
    parser.add_argument(
        "--end-with-parent",
        type=positive,
        metavar="PID",
        help="kill this process when its parent process PID ends (Linux)",
    )


def end_with_parent(pid: int | None) -> None:
    """Let the kernel kill this process when its parent ends. None: do nothing.

    Raises:
        TeacherSetupError: The parent process is not ``pid``, or this system is not Linux.
    """
    if pid is None:
        return
    if sys.platform != "linux":
        raise TeacherSetupError(
            f"--end-with-parent needs Linux, this is {sys.platform}",
            options=("--end-with-parent",),
            remedy="leave it out",
        )
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pid:
        raise TeacherSetupError(
            f"--end-with-parent {pid}: the parent process is {os.getppid()}",
            options=("--end-with-parent",),
            remedy="pass the pid of a running parent",
        )


def write_ready_file(path: str) -> None:
    """Write the pid to a file. A symbolic link in its place is not followed. An empty path: do nothing.

    Raises:
        TeacherSetupError: The file cannot be written.
    """
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")
    except OSError as error:
        raise TeacherSetupError(
            f"--ready-file {path} cannot be written: {error.strerror or error}",
            options=("--ready-file",),
            path=Path(path),
            remedy="name another",
        ) from None
