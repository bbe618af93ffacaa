"""End of a command when the reader of its output closes it, as ``head`` does. That is no error."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

CLOSED = 128 + signal.SIGPIPE
"""Exit status of a command that ended before its last output, because its reader had closed it."""


class OutputClosed(BaseException):
    """End of the command. No handler of ``Exception`` reports it as an error of the disk or of the program."""


def run_until_closed(command: Callable[[], int]) -> int:
    """Run a command until the reader of its output closes it.

    Args:
        command: Function that returns the exit status.

    Returns:
        Exit status of the command, even if the reader closed the output before its last line was sent.
        :data:`CLOSED` if the command did not reach its end.
    """
    status = CLOSED
    with until_closed():
        status = command()
    return status


@contextmanager
def until_closed() -> Iterator[None]:
    """End the body without an error when the reader closes stdout. What is written to a closed stderr is discarded."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _guard(streams[0], ends_command=True), _guard(streams[1], ends_command=False)
    try:
        yield
    except OutputClosed:
        pass
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OutputClosed, AttributeError):  # a process may have no streams
                stream.flush()
        sys.stdout, sys.stderr = streams


def _guard(stream: TextIO, *, ends_command: bool) -> TextIO:
    """Return a stream to the same descriptor, or ``stream`` itself if it has none."""
    try:
        stream.flush()
        raw = _GuardedFile(stream.fileno(), ends_command)
    except (AttributeError, OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=not ends_command or stream.isatty(),
    )


class _GuardedFile(io.FileIO):
    """Descriptor that discards what is written once its reader has closed it."""

    def __init__(self, descriptor: int, ends_command: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._ends_command = ends_command

    def write(self, data: Any, /) -> int:
        """Write bytes, or end the command."""
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
        if self._ends_command and threading.current_thread() is threading.main_thread():
            raise OutputClosed
        return len(data)
