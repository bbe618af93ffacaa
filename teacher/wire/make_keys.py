"""Creation of the keys that ``auth`` reads. A folder is created completely or not at all; nothing is overwritten."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from zmq.auth import create_certificates

from teacher.errors import TeacherSetupError
from teacher.wire.auth import DEFAULT_CLIENT, require_curve, server_keys


def make_keys(auth_dir: str | Path) -> Path:
    """Create the keys of a server and of its first client.

    Args:
        auth_dir: Folder to create. It may exist if it is empty.

    Returns:
        The folder of the client's keys.

    Raises:
        TeacherSetupError: ``auth_dir`` is not empty, or cannot be written.
    """
    require_curve()
    folder = Path(auth_dir).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        state = "has server keys already" if (folder / "server.key_secret").exists() else "is not empty"
        raise TeacherSetupError(
            f"{folder} {state}, and keys are never overwritten",
            path=folder,
            options=("--auth-dir",),
            remedy="name another --auth-dir, or add a client to this one with --client NAME",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 0700
        try:
            _create(partial, "server")
            for name in ("allowed", "clients"):
                (partial / name).mkdir(mode=0o700)
            _make_client(partial, DEFAULT_CLIENT)
            partial.rename(folder)  # atomic
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise TeacherSetupError(
            f"cannot make keys in {folder}: {error}",
            path=folder,
            options=("--auth-dir",),
            remedy="name a writable --auth-dir",
        ) from None
    return folder / "clients" / DEFAULT_CLIENT


def add_client(auth_dir: str | Path, name: str) -> Path:
    """Create the keys of one more client, which a running server accepts within a second.

    Args:
        auth_dir: Folder of the server's keys.
        name: Name of the client: up to 64 letters, digits and ``. _ -``.

    Returns:
        The folder of the client's keys.

    Raises:
        TeacherSetupError: The name is invalid, ``auth_dir`` has no server keys, or it already has this client.
    """
    require_curve()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise TeacherSetupError(
            f"--client must be up to 64 letters, digits and . _ -, got {name!r:.80}", options=("--client",)
        )
    folder = Path(auth_dir).absolute()
    server_keys(folder)  # checks that the folder is complete and undamaged
    if (folder / "allowed" / f"{name}.key").exists() or (folder / "clients" / name).exists():
        raise TeacherSetupError(
            f"{folder} has a client {name!r}, and keys are never overwritten",
            path=folder,
            options=("--client",),
            remedy="choose another name",
        )
    try:
        _make_client(folder, name)
    except OSError as error:
        raise TeacherSetupError(
            f"cannot make the keys of {name!r} in {folder}: {error}", path=folder, remedy="make the folder writable"
        ) from None
    return folder / "clients" / name


def _make_client(folder: Path, name: str) -> None:
    partial = Path(tempfile.mkdtemp(prefix=".", dir=folder / "clients"))
    try:
        _create(partial, "client")
        shutil.copyfile(folder / "server.key", partial / "server.key")
        # A running server reads every *.key file, so the file gets its final name when it is complete.
        allowed = folder / "allowed" / f".{name}.part"
        shutil.copyfile(partial / "client.key", allowed)
        partial.rename(folder / "clients" / name)
        allowed.rename(folder / "allowed" / f"{name}.key")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _create(folder: Path, name: str) -> None:
    _, secret = create_certificates(folder, name)
    os.chmod(secret, 0o600)
