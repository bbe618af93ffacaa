"""Temporary folders that belong to one process and are removed after it has ended, however it has ended.

The name of a folder contains the identity of its process and a random part, and the folder is used only if it belongs
to this user and nobody else may enter it. So neither other users of the machine nor containers that share its temporary
folder can put files or links in the way, and a reader finds the folders of a process by its pid.
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
from recipe_gkd.runtime.process_id import ProcessId, boot_id, is_alive, process_id

_PREFIX = "gkd"
"""Short, as is the rest of a name: sockets lie in these folders, whose paths may have 107 characters."""
_KEPT_S = 8
"""Time that a folder outlives a process that nobody cleans up after: a diagnosis may still read it."""
_REMOVE = """
  for _ in $(seq $(($2 * 5))); do [ -d "$1" ] || exit 0; sleep 0.2; done
  rm -rf -- "$1"
"""


def scratch_folder() -> Path:
    """Return the folder of this process, made at the first call."""
    return _make(os.getpid())


def folders_of(pid: int) -> list[Path]:
    """Return the folders that processes with this pid have made, in this boot and pid namespace, and that are safe."""
    return [folder for folder in _parent().glob(f"{_PREFIX}_{_machine()}_{pid}_*") if _is_private(folder)]


def remove_of(process: ProcessId) -> None:
    """Remove the folder of a process that has ended."""
    for folder in _parent().glob(f"{_prefix(process)}*"):
        if _is_private(folder):
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _make(pid: int) -> Path:
    _remove_stale()
    process = process_id(pid)
    assert process is not None
    folder = tempfile.mkdtemp(prefix=_prefix(process), dir=_parent())
    run_after_this_process(_REMOVE, folder, str(_KEPT_S))  # if nobody else has removed it
    return Path(folder)


def _remove_stale() -> None:
    """Remove the folders of processes of this boot and pid namespace that have ended together with their janitors."""
    for folder in _parent().glob(f"{_PREFIX}_{_machine()}_*"):
        with suppress(ValueError, IndexError):
            pid, start_ticks = folder.name.split("_")[2:4]
            if not is_alive(ProcessId(boot_id(), int(pid), int(start_ticks, 16))) and _is_private(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Return True for a folder, not a link to one, of this user, closed to all others."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return False


def _prefix(process: ProcessId) -> str:
    return f"{_PREFIX}_{_machine()}_{process.pid}_{process.start_ticks:x}_"


def _machine() -> str:
    """Return a hash of this boot and pid namespace. Others may share the temporary folder."""
    return f"{binascii.crc32((boot_id() + os.readlink('/proc/self/ns/pid')).encode()):08x}"


def _parent() -> Path:
    return Path(tempfile.gettempdir())
