"""Whole files that a run writes occasionally, on a disk that may be full or unreachable for some time."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 64 << 20
"""Maximum size of the files that wait for the disk."""


class PendingFiles:
    """Writer of whole files. One that cannot be written is kept in memory, and each later write tries it again.

    Files beyond ``MAX_PENDING_BYTES`` are lost, the oldest first. Safe in several threads.
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, bytes] = {}
        self._lock = threading.Lock()
        self._has_warned = False

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, which appears under its name when it is complete. Never raises an ``OSError``."""
        with self._lock:
            self._waiting.pop(path, None)
            self._waiting[path] = content
            self._write_waiting()
            while sum(map(len, self._waiting.values())) > MAX_PENDING_BYTES:
                lost = next(iter(self._waiting))
                del self._waiting[lost]
                log.warning("%s was not written: the disk has failed for too long", lost)

    def close(self) -> None:
        """Write what waits. Never raises an ``OSError``."""
        with self._lock:
            self._write_waiting()
            for path in self._waiting:
                log.warning("%s was not written", path)

    def _write_waiting(self) -> None:
        for path, content in list(self._waiting.items()):
            try:
                _write(path, content)
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("%s cannot be written: %s; it is kept in memory and tried again later", path, error)
                return
            del self._waiting[path]


def _write(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
