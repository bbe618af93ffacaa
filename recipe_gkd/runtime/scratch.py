"""Temporary folders of one process. They are removed after the process has ended, even if it was killed.

The name of a folder contains the identity of its process and a random part, so the folders of a process are found by
its pid. A folder is used only if it belongs to this user and other users cannot enter it. Therefore neither other users
of the machine nor containers that share its temporary folder can plant files or links.
"""

from __future__ import annotations

import binascii
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from recipe_gkd.runtime.after_exit import run_after_this_process
from teacher.common.process_id import ProcessId, boot_id, is_alive, process_id

_PREFIX = "gkd"
"""Prefix of folder names. Names are short because the folders contain sockets, whose paths may have 107 characters."""
_RETENTION_S = 8
"""Time that a folder remains after the end of its process, for the diagnosis."""
_REMOVE = """
  for _ in $(seq $(($2 * 5))); do [ -d "$1" ] || exit 0; sleep 0.2; done
  rm -rf -- "$1"
"""


def scratch_folder() -> Path:
    """Return the folder of this process. The first call creates it."""
    return _make(os.getpid())


def folders_of(pid: int) -> list[Path]:
    """Return the private folders of processes with this pid, in this boot and pid namespace."""
    return [folder for folder in _parent().glob(f"{_PREFIX}_{machine()}_{pid}_*") if _is_private(folder)]


def remove_folders_of(process: ProcessId) -> None:
    """Remove the folders of a process that has ended."""
    for folder in _parent().glob(f"{_prefix(process)}*"):
        if _is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _make(pid: int) -> Path:
    remove_stale()
    process = process_id(pid)
    assert process is not None
    folder = tempfile.mkdtemp(prefix=_prefix(process), dir=_parent())
    run_after_this_process(_REMOVE, folder, str(_RETENTION_S))
    return Path(folder)


def remove_stale() -> None:
    """Remove folders of ended processes of this boot and pid namespace. They remain if the watcher was killed too."""
    for folder in _parent().glob(f"{_PREFIX}_{machine()}_*"):
        with suppress(ValueError, IndexError):
            pid, start_ticks = folder.name.split("_")[2:4]
            if not is_alive(ProcessId(boot_id(), int(pid), int(start_ticks, 16))) and _is_private(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Return True if ``folder`` is a folder, not a link, that belongs to this user and is closed to others."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return False


def _prefix(process: ProcessId) -> str:
    return f"{_PREFIX}_{machine()}_{process.pid}_{process.start_ticks:x}_"


def machine() -> str:
    """Return a hash of this boot and pid namespace. Other machines or containers may share the temporary folder."""
    return f"{binascii.crc32((boot_id() + os.readlink('/proc/self/ns/pid')).encode()):08x}"


def _parent() -> Path:
    return Path(tempfile.gettempdir())
