"""Lock of a run folder, held for the life of the driver's process, so that only one run uses the folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from recipe_gkd.config.keys import key_name
from recipe_gkd.errors import ConfigError, RunFolderInUse
from teacher.common.process_id import ProcessId, is_alive, process_id

log = logging.getLogger(__name__)

KEY = key_name(lambda config: config.trainer.default_local_dir)
LOCK = ".lock"
_HELD_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

_held: set[int] = set()  # descriptors of the locks that this process holds


@dataclass(frozen=True)
class Owner:
    """Process that holds a lock, as written into the lock file.

    Attributes:
        process: Its process id and start time.
        since: Time at which it took the lock, in ISO format.
    """

    host: str
    process: ProcessId
    since: str

    def __str__(self) -> str:
        return f"on host {self.host} with pid {self.process.pid}, since {self.since}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing ``folder`` during the body.

    The kernel releases the lock when this process ends, even by SIGKILL. Child processes do not hold it, because the
    descriptor is closed in a fork and by exec.

    Raises:
        RunFolderInUse: Another process holds the lock. ``host`` and ``pid`` are its own.
        ConfigError: The folder cannot be locked.
    """
    descriptor = _take(folder / LOCK)
    _held.add(descriptor)
    try:
        _write_owner(descriptor)
        yield
    finally:
        if descriptor in _held:  # not in a fork of this process
            _held.discard(descriptor)
            os.close(descriptor)


def _take(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{KEY}: {path} cannot be opened: {error}", remedy="choose a folder that can be written", keys=(KEY,)
            ) from error
        try:
            _lock(descriptor, path)
            # A rejected run removes the file while it holds the lock. Then this file is no longer the folder's lock.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _read_owner(path)
        if error.errno in _HELD_ERRNOS:
            raise _in_use_error(path, owner) from error
        if error.errno not in _NOT_SUPPORTED:
            raise ConfigError(
                f"{KEY}: {path} cannot be locked: {error}", remedy="choose a folder on another disk", keys=(KEY,)
            ) from error
        if owner is not None and is_alive(owner.process):
            raise _in_use_error(path, owner) from error
        log.warning(
            "the file system of %s does not support locks (%s): make sure that no other run uses this folder; the last "
            "run was %s",
            path.parent,
            error.strerror,
            owner or "none",
        )


def _in_use_error(path: Path, owner: Owner | None) -> RunFolderInUse:
    return RunFolderInUse(
        f"{KEY}={path.parent} is in use by another run, {owner or f'whose host and pid are not in {path} yet'}",
        remedy=f"wait for its end, stop it, or choose another {KEY} or trainer.experiment_name",
        keys=(KEY,),
        path=path.parent,
        pid=None if owner is None else owner.process.pid,
        host="" if owner is None else owner.host,
    )


def _write_owner(descriptor: int) -> None:
    process = process_id(os.getpid())
    assert process is not None
    owner = Owner(socket.gethostname(), process, datetime.now().astimezone().isoformat(timespec="seconds"))
    text = json.dumps(asdict(owner)) + "\n"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    except OSError as error:  # the lock is valid even if the disk is full
        log.warning("host and pid of this run cannot be written into the lock file: %s", error)


def _read_owner(path: Path) -> Owner | None:
    try:
        found = json.loads(path.read_text())
        return Owner(str(found["host"]), ProcessId(**found["process"]), str(found["since"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _close_in_child() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
