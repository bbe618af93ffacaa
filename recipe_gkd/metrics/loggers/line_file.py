"""Text files to which a run appends lines, on a disk that may be full or unreachable for some time."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 32 << 20
"""Maximum size of the lines that wait for the disk. A line of metrics has 3 kB."""


class LineFile:
    """Writer of lines. A failure is logged once, and the lines are kept in memory until they can be written.

    A line is written completely or not at all. Lines beyond ``MAX_PENDING_BYTES`` are lost, the oldest first.

    Lifecycle::

        file = LineFile(path, is_kept)      # removes the lines from the first one on that is not kept
        file.append(b"{}")
        file.close()                        # the last attempt; never raises

    Args:
        path: File. Its folder is made.
        is_kept: Function that returns True for each line of an earlier run that stays.

    Attributes:
        last_kept: Last line of the file when it was opened. Empty without one, and after :meth:`append`.
    """

    def __init__(self, path: Path, is_kept: Callable[[bytes], bool]) -> None:
        self._path, self._is_kept = path, is_kept
        self._pending: deque[bytes] = deque()
        self._pending_bytes = self._n_lost = 0
        self._descriptor: int | None = None
        self._size = self._last_kept_at = 0  # end of the complete lines, and start of the last kept one
        self._has_warned = False
        self.last_kept = b""
        self._flush()

    def append(self, line: bytes, *, instead_of_last: bool = False) -> None:
        """Write a line, or keep it for the next attempt.

        Args:
            line: Line without its end.
            instead_of_last: Replace :attr:`last_kept`.
        """
        if instead_of_last:
            self._size = self._last_kept_at  # the next write truncates the file
        self.last_kept = b""
        self._pending.append(line + b"\n")
        self._pending_bytes += len(line) + 1
        while self._pending_bytes > MAX_PENDING_BYTES:
            self._pending_bytes -= len(self._pending.popleft())
            self._n_lost += 1
        self._flush()
        self.last_kept = b""  # if the file was opened only now

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        self._flush()
        if self._pending or self._n_lost:
            log.warning("%d lines of %s were not written", len(self._pending) + self._n_lost, self._path)
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _flush(self) -> None:
        try:
            if self._descriptor is None:
                self._open()
            while self._pending:
                self._write(self._pending[0])
                self._pending_bytes -= len(self._pending.popleft())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s cannot be written: %s; its lines are kept in memory, and each later line tries again",
                    self._path,
                    error,
                )

    def _open(self) -> None:
        """Open the file, and find the end of the lines that are kept. Needs no space on the disk for an old file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            size = last_at = 0
            last = b""
            with open(descriptor, "rb", closefd=False) as lines:
                for line in lines:
                    if not line.endswith(b"\n") or not self._is_kept(line):
                        break
                    last, last_at, size = line.rstrip(b"\n"), size, size + len(line)
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._size, self._last_kept_at, self.last_kept = descriptor, size, last_at, last

    def _write(self, line: bytes) -> None:
        """Write a line after the complete ones. A part of an earlier attempt is overwritten."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, self._size)
        written = 0
        while written < len(line):
            written += os.pwrite(self._descriptor, line[written:], self._size + written)
        self._size += len(line)
