"""CURVE keys: authentication of clients and workers, and encryption of their connections.

The server holds the public keys of the clients that may connect; a client or worker holds the server's public key. A
key is 40 characters of Z85. ``teacher.wire.make_keys`` creates this folder::

    DIR/server.key, server.key_secret     keys of the proxy
    DIR/allowed/NAME.key                  public keys of the clients that may connect
    DIR/clients/NAME/                     keys for the machine of a trainer or worker; copy this folder to it
        server.key, client.key, client.key_secret

A client can also use DIR itself, which then stands for ``DIR/clients/default``.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from teacher.errors import TeacherSetupError

DEFAULT_CLIENT = "default"
ZAP_DOMAIN = b"teacher"
_KEY_CHARS = 40
_MAKE_HINT = "make keys with `python -m teacher keys --auth-dir DIR`"
_COPY_HINT = "set --auth-dir (AUTH_DIR) to the folder DIR of `python -m teacher keys`, or to a copy of its clients/NAME"
_AUTH_OPTIONS = ("--auth-dir",)


@dataclass(frozen=True)
class ServerKeys:
    """Keys of a proxy.

    Attributes:
        public: Public key.
        secret: Secret key.
        allowed: Public keys of the clients and workers that may connect.
        allowed_dir: Folder from which the allowed keys are read again while the proxy runs.
    """

    public: bytes
    secret: bytes
    allowed: tuple[bytes, ...]
    allowed_dir: Path | None = None

    def secure(self, socket: zmq.Socket) -> None:
        """Configure a socket before it is bound. It then needs a ``CurveAuthenticator`` in the same context."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        # Without an authenticator, libzmq accepts every client that has the server's public key. Enforcing the ZAP
        # domain makes it refuse all of them instead.
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True)
class ClientKeys:
    """Keys of a client or worker.

    Attributes:
        server_public: Public key of the proxy.
        public: Public key of the client.
        secret: Secret key of the client. It is never printed.
        folder: Folder that they were read from, for messages.
    """

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)
    folder: str = field(compare=False)

    def secure(self, socket: zmq.Socket) -> None:
        """Configure a socket before it is connected."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


Keys = ServerKeys | ClientKeys


# --- read keys -------------------------------------------------------------------------------------------------------

_KeysT = TypeVar("_KeysT", ServerKeys, ClientKeys)


def server_keys(auth_dir: str | Path | None) -> ServerKeys | None:
    """Read the keys of a proxy.

    Args:
        auth_dir: Folder of keys. None or "" stands for a service without keys.

    Returns:
        The keys, None for a service without keys.

    Raises:
        TeacherSetupError: A file is missing or damaged, or other users can access it.
    """
    return _read_keys(auth_dir, _read_server_keys)


def client_keys(auth_dir: str | Path | ClientKeys | None) -> ClientKeys | None:
    """Read the keys of a client or worker, unless they are given. Result and errors: see ``server_keys``."""
    return auth_dir if isinstance(auth_dir, ClientKeys) else _read_keys(auth_dir, _read_client_keys)


def _read_keys(auth_dir: str | Path | None, read: Callable[[Path], _KeysT]) -> _KeysT | None:
    if not auth_dir:
        return None
    require_curve()
    folder = Path(auth_dir).absolute()
    try:
        if not folder.is_dir():
            raise TeacherSetupError(
                f"the folder of keys {folder} does not exist or is no folder",
                path=folder,
                remedy=_COPY_HINT,
                options=_AUTH_OPTIONS,
            )
        return read(folder)
    except OSError as error:
        raise TeacherSetupError(
            f"the keys in {error.filename} cannot be read by user id {os.getuid()}: {error.strerror}",
            path=Path(error.filename or folder),
            remedy="run this as the user who made them, or make a copy for this user",
            options=_AUTH_OPTIONS,
        ) from None


def _read_server_keys(folder: Path) -> ServerKeys:
    public, secret = _read_pair(folder / "server.key_secret", "a server", _MAKE_HINT)
    allowed_dir = folder / "allowed"
    if not allowed_dir.is_dir():
        raise TeacherSetupError(
            f"{allowed_dir} is missing: expected a folder of the clients' public keys",
            path=allowed_dir,
            remedy=_MAKE_HINT,
            options=_AUTH_OPTIONS,
        )
    for path in (folder, allowed_dir):
        _refuse_other_users(path, 0o022, "written", "go-w")
    allowed = tuple(_read(path)[0] for path in sorted(allowed_dir.glob("*.key")))
    if not allowed:
        raise TeacherSetupError(
            f"{allowed_dir} has no NAME.key, so no client could connect",
            path=allowed_dir,
            remedy=f"add a client with `python -m teacher keys --auth-dir {folder} --client NAME`",
            options=_AUTH_OPTIONS,
        )
    return ServerKeys(public, secret, allowed, allowed_dir)


def _read_client_keys(auth_dir: Path) -> ClientKeys:
    folder = auth_dir
    if not (folder / "client.key_secret").exists() and (default := folder / "clients" / DEFAULT_CLIENT).is_dir():
        folder = default
    public, secret = _read_pair(folder / "client.key_secret", "a client", _COPY_HINT)
    return ClientKeys(_read(folder / "server.key")[0], public, secret, str(auth_dir))


def allowed_keys(folder: Path) -> dict[bytes, str]:
    """Return the client name of each allowed public key in a folder. Unreadable files are skipped."""
    found = {}
    with suppress(OSError):
        for path in folder.glob("*.key"):
            with suppress(TeacherSetupError):  # the file may be half copied; its client is refused, and that is logged
                found[_read(path)[0]] = path.stem
    return found


def _read_pair(path: Path, owner: str, remedy: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key of a secret key file."""
    if not path.exists():
        raise TeacherSetupError(
            f"{path} is missing: expected the secret key of {owner}", path=path, remedy=remedy, options=_AUTH_OPTIONS
        )
    _refuse_other_users(path, 0o077, "read", "go=")
    public, secret = _read(path)
    if secret is None or zmq.curve_public(secret) != public:
        raise TeacherSetupError(
            f"{path} is damaged: expected a public key and its secret key",
            path=path,
            remedy="restore it or make new keys",
            options=_AUTH_OPTIONS,
        )
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key of a key file, and the secret key if the file has one."""
    if not path.exists():
        raise TeacherSetupError(
            f"{path} is missing: expected a public key", path=path, remedy=_COPY_HINT, options=_AUTH_OPTIONS
        )
    try:
        public, secret = load_certificate(path)
        for key in (public, secret or public):
            if len(key) != _KEY_CHARS:
                raise ValueError(f"a key has {_KEY_CHARS} characters, got {len(key)}")
            z85.decode(key)
    except (OSError, ValueError, KeyError, ArithmeticError, IndexError) as error:
        raise TeacherSetupError(
            f"{path} is damaged or cannot be read: expected a CURVE key file, got {error!r:.120}",
            path=path,
            remedy="restore it or make new keys",
            options=_AUTH_OPTIONS,
        ) from None
    return public, secret


def _refuse_other_users(path: Path, mode_bits: int, verb: str, chmod_mode: str) -> None:
    if (mode := path.stat().st_mode & 0o777) & mode_bits:
        raise TeacherSetupError(
            f"{path} can be {verb} by other users (mode {mode:03o}), who could then grant access to the service, "
            "expected access for its owner only",
            path=path,
            remedy=f"run chmod {chmod_mode} {path}",
            options=_AUTH_OPTIONS,
        )


def require_curve() -> None:
    """Check that libzmq was built with CURVE.

    Raises:
        TeacherSetupError: It was not.
    """
    if not zmq.has("curve"):
        raise TeacherSetupError(
            "the libzmq of this Python was built without CURVE, so keys cannot be used",
            remedy="install a wheel of pyzmq from PyPI (pip install --force-reinstall pyzmq), or omit --auth-dir on a "
            "loopback address",
            options=_AUTH_OPTIONS,
        )


# --- addresses that need no keys -------------------------------------------------------------------------------------


def check_bind(bind: str, keys: ServerKeys | None, *, trusted_network: bool = False) -> None:
    """Check that an address may be bound with these keys.

    Args:
        bind: IPv4 address or interface.
        keys: CURVE keys, None for plain connections.
        trusted_network: True to allow plain connections on any address.

    Raises:
        TeacherSetupError: Other machines could reach the address and there are no keys, or it is an IPv6 address, or
            there are keys in spite of ``trusted_network``.
    """
    if keys is not None and trusted_network:
        raise TeacherSetupError(
            "--trusted-network allows connections without keys, but --auth-dir is set",
            options=("--trusted-network", *_AUTH_OPTIONS),
            remedy="omit one of them",
        )
    if ":" in bind:
        raise TeacherSetupError(
            f"--bind {bind}: expected an IPv4 address or a name, such as 127.0.0.1 or 10.0.0.1", options=("--bind",)
        )
    if keys is None and not trusted_network and not is_loopback(bind):
        raise TeacherSetupError(
            f"--bind {bind} can be reached from other machines. Without keys, everyone who reaches it could use, read "
            "and disturb this service",
            options=("--bind", *_AUTH_OPTIONS, "--trusted-network"),
            remedy="make keys once and start with them:",
            details=(
                "  python -m teacher keys --auth-dir DIR",
                f"  AUTH_DIR=DIR BIND={bind} teacher/start_server.sh ...",
                "Or serve this machine only: --bind 127.0.0.1",
                "Or, if only machines that you trust can reach this network, allow plain connections: "
                "--trusted-network (TRUSTED_NETWORK=1)",
            ),
        )


def is_loopback(host: str) -> bool:
    """Return True if all addresses of a host name or IP belong to this machine only. False if it has no address."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)} if host not in ("", "*") else set()
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
