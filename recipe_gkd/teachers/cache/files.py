"""Scores in files: one file per response, below a folder that several processes and nodes may share.

A file is a numpy archive (``.npz``), whose checksums are verified when it is read. Files are replaced atomically, and
no lock is needed: a file that another process has deleted is a response without scores.
"""

from __future__ import annotations

import io
import logging
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from teacher.records import ScoredSequence

log = logging.getLogger(__name__)

SCAN_SHARE = 1 / 32
"""Part of the maximum size that a process writes before it measures the folder again."""
KEPT_SHARE = 7 / 8
"""Part of the maximum size to which a full folder is reduced."""
SUFFIX = ".npz"
_FILE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}/[0-9a-f]{2}/(draft-)?[0-9a-f]{30,32}\.npz")
"""Files of a cache, as :class:`~recipe_gkd.teachers.cache.scores.ScoreCache` names them. No others are deleted."""
_NAMES = ("topk_logps_TK", "topk_ids_TK", "sampled_logps_T", "support_logps_TJ")


class ScoreFiles:
    """Files of scores below a folder. Those that were not used for the longest time are deleted if it is full.

    A folder that is used by P processes may exceed its maximum by the share P / 32. Thread-safe.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Use a folder, which is created with the first file.

        Args:
            root: Folder of all files.
            max_bytes: Maximum total size of the files.
        """
        self._root, self._max_bytes = root, max_bytes
        self._scan_bytes = int(max_bytes * SCAN_SHARE)
        self._n_written = self._scan_bytes  # the folder is measured before the first file
        self._lock, self._has_warned = Lock(), False

    def read(self, path: Path) -> ScoredSequence | None:
        """Return the scores of a file, or None if it is missing or damaged. A damaged file is deleted."""
        try:
            with np.load(path) as archive:
                arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
            scored = ScoredSequence(**arrays)
        except OSError:
            return None
        except Exception as error:  # noqa: BLE001 - damage of a zip file raises many types
            log.warning("%s is damaged and was deleted: %s: %s", path, type(error).__name__, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # such as a file system that is mounted read-only
            os.utime(path)
        return scored

    def write(self, path: Path, scored: ScoredSequence) -> None:
        """Write the scores of a response, unless they are larger than 1/32 of the maximum.

        A failure, such as a full disk, is logged once and leaves no file.
        """
        buffer = io.BytesIO()
        np.savez(buffer, **{name: array for name in _NAMES if (array := getattr(scored, name)) is not None})
        content = buffer.getbuffer()
        if len(content) > self._scan_bytes:
            return
        try:
            self._make_room(len(content))
            replace_file(path, content)
        except OSError as error:
            if not self._has_warned:
                log.warning("scores are not written to the cache: %s: %s", type(error).__name__, error)
                self._has_warned = True

    def _make_room(self, n_bytes: int) -> None:
        with self._lock:
            if self._n_written + n_bytes > self._scan_bytes:
                self._n_written = 0
                self._delete_oldest()
            self._n_written += n_bytes

    def _delete_oldest(self) -> None:
        """Reduce a folder that could exceed its maximum before the next measurement."""
        found = sorted(_files(self._root))
        total = sum(size for _, size, _ in found)
        if total <= self._max_bytes - self._scan_bytes:
            return
        n_deleted, excess = 0, total - int(self._max_bytes * KEPT_SHARE)
        for _, size, path in found:
            if excess <= 0:
                break
            with suppress(OSError):  # another process has deleted it, or it belongs to another user
                path.unlink()
                excess, n_deleted = excess - size, n_deleted + 1
        log.info("the cache %s was full: %d of %d files were deleted", self._root, n_deleted, len(found))


def _files(root: Path) -> list[tuple[float, int, Path]]:
    """Return the time of the last use, the size and the path of each file."""
    found = []
    for path in root.glob(f"*-*/??/*{SUFFIX}"):
        if _FILE.fullmatch(path.relative_to(root).as_posix()):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
    return found


def replace_file(path: Path, content: memoryview) -> None:
    """Replace a file atomically. It is not flushed: after a power loss its checksums show whether it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"draft-{uuid.uuid4().hex}{path.suffix}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
