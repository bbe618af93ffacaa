"""Makes keys for `auth`: each folder whole, or not at all, and nothing is ever overwritten."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from zmq.auth import create_certificates

from teacher.errors import TeacherError
from teacher.wire.auth import DEFAULT_CLIENT, require_curve, server_keys


def make_keys(auth_dir: str | Path) -> Path:
    """Make the server's keys and those of a first client. Returns the client's folder.

    Raises: TeacherError if there is anything in `auth_dir` already, or it cannot be written.
    """
    require_curve()
    folder = Path(auth_dir).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "has server keys already" if (folder / "server.key_secret").exists() else "is not empty"
        raise TeacherError(
            f"{folder} {what}, and keys are never overwritten; name another --auth-dir, or add a client to this one "
            "with --client NAME"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # 0700
        try:
            _create(making, "server")
            for name in ("allowed", "clients"):
                (making / name).mkdir(mode=0o700)
            _make_client(making, DEFAULT_CLIENT)
            making.rename(folder)  # whole, or not at all
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    except OSError as error:
        raise TeacherError(f"cannot make keys in {folder}: {error}; name an --auth-dir that can be written") from None
    return folder / "clients" / DEFAULT_CLIENT


def add_client(auth_dir: str | Path, name: str) -> Path:
    """Make the keys of one more client, whom the server lets in from now on. Returns its folder.

    Raises: TeacherError if `auth_dir` has no server keys, or has this client.
    """
    require_curve()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise TeacherError(f"--client must be up to 64 letters, digits and . _ -, got {name!r:.80}")
    folder = Path(auth_dir).absolute()
    server_keys(folder)  # complete and undamaged
    if (folder / "allowed" / f"{name}.key").exists() or (folder / "clients" / name).exists():
        raise TeacherError(f"{folder} has a client {name!r}, and keys are never overwritten; choose another name")
    try:
        _make_client(folder, name)
    except OSError as error:
        raise TeacherError(f"cannot make the keys of {name!r} in {folder}: {error}") from None
    return folder / "clients" / name


def _make_client(folder: Path, name: str) -> None:
    making = Path(tempfile.mkdtemp(prefix=".", dir=folder / "clients"))
    try:
        _create(making, "client")
        shutil.copyfile(folder / "server.key", making / "server.key")
        # The server takes what ends in .key: a name is given to the file once it is whole.
        allowed = folder / "allowed" / f".{name}.part"
        shutil.copyfile(making / "client.key", allowed)
        making.rename(folder / "clients" / name)
        allowed.rename(folder / "allowed" / f"{name}.key")
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _create(folder: Path, name: str) -> None:
    _, secret = create_certificates(folder, name)
    os.chmod(secret, 0o600)
