"""File writes that survive a power loss: the content of a file reaches the disk before its name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of ``fsync`` on a folder if the file system (FUSE, SMB) does not implement it."""


def write_durably(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` atomically."""
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush every file below ``folder``, and every folder after its content. Flushing a clean file is cheap."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(parent) / name)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder``."""
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def sync_file(path: Path) -> None:
    """Flush the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
