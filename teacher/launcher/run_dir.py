"""Creation and checks of the run folder of a start."""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from teacher.errors import TeacherSetupError
from teacher.launcher.pid_files import read_pid_files

STOP_SCRIPT = Path(__file__).parents[1] / "stop_server.sh"
_LOCK = ".start.lock"


@contextmanager
def prepared_run_dir(folder: Path, report: Callable[[str], None]) -> Iterator[Path]:
    """Create the run folder, remove files of ended processes, and yield the absolute path. No other start may use it.

    Args:
        folder: The run folder.
        report: Function that writes a line to stderr.

    Raises:
        TeacherSetupError: The folder cannot be created or written, others may write it, its processes run, another
            start uses it, or it has pid files of other hosts.
    """
    mask = os.umask(0)
    os.umask(mask | stat.S_IWOTH)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create RUN_DIR={folder}: {error.strerror}: {error.filename}"
        raise _refused(folder, what, "set RUN_DIR to a folder that you can write") from None
    finally:
        os.umask(mask)
    folder = Path(os.path.abspath(folder))
    _check_owner(folder)
    with _locked(folder, report):
        _remove_old_files(folder, report)
        yield folder


@contextmanager
def _locked(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the folder. The processes of the service do not inherit it."""
    with open(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another start in RUN_DIR={folder} has not ended"
            raise _refused(folder, what, "wait for its end, or set another RUN_DIR") from None
        except OSError as error:
            report(f"{folder} cannot be locked ({error.strerror}), so start nothing else in it at the same time")
        yield


def _remove_old_files(folder: Path, report: Callable[[str], None]) -> None:
    """Remove the files of ended processes. Refuse a folder with live or unknown processes."""
    ours, foreign = read_pid_files(folder)
    for file in foreign:
        report(f"left alone: {file.path}: {file.foreign}")
    if foreign:
        what = f"RUN_DIR={folder} holds pid files that are damaged or of another host"
        raise _refused(folder, what, "see above, or set another RUN_DIR")
    if any(file.is_running() for file in ours):
        remedy = f"stop them with {STOP_SCRIPT} --run-dir {folder}, or start more beside them with another --run-dir"
        raise _refused(folder, f"the processes in {folder} are running already", remedy)
    for path in (*folder.glob("*.pid"), *folder.glob("*.ready")):
        path.unlink()


def _check_owner(folder: Path) -> None:
    """Refuse a folder in which another user could put links in place of logs."""
    try:
        descriptor, probe = tempfile.mkstemp(prefix=".probe.", dir=folder)
    except OSError as error:
        what = f"RUN_DIR={folder} cannot be written: {error.strerror}"
        raise _refused(folder, what, "set RUN_DIR to a writable folder") from None
    os.close(descriptor)
    own, found = os.stat(probe).st_uid, folder.stat()  # of a new file, because file servers can map users
    os.unlink(probe)
    if own != found.st_uid:
        owner = str(found.st_uid)
        with suppress(KeyError):
            owner = pwd.getpwuid(found.st_uid).pw_name
        what = f"RUN_DIR={folder} belongs to another user ({owner}), and that user could replace logs by links"
        raise _refused(folder, what, "set RUN_DIR to a folder of your own")
    if found.st_mode & stat.S_IWOTH:
        what = f"every user can write RUN_DIR={folder}, and could put links in place of logs"
        raise _refused(folder, what, f"chmod o-w {folder}, or set RUN_DIR to a folder of your own")


def _refused(folder: Path, what: str, remedy: str) -> TeacherSetupError:
    return TeacherSetupError(what, remedy=remedy, options=("RUN_DIR",), path=folder)
