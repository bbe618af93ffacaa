"""CURVE: who may talk to a service, and that nobody else can listen or change what is said.

The server knows the public keys that it lets in; a client or a worker knows the server's. A key is 40
characters of Z85. A folder of keys, as `teacher.wire.make_keys` makes it:

    DIR/server.key, server.key_secret     of the proxy
    DIR/allowed/NAME.key                  whom it lets in
    DIR/clients/NAME/                     what the machine of a trainer or worker needs: copy it there
        server.key, client.key, client.key_secret

DIR serves as the folder of a client too: it then is `clients/default`.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from teacher.errors import TeacherError

logger = logging.getLogger(__name__)

DEFAULT_CLIENT = "default"
ZAP_DOMAIN = b"teacher"
_MAKE_HINT = "make keys with `python -m teacher keys --auth-dir DIR`"
_COPY_HINT = "--auth-dir (AUTH_DIR) is the folder DIR that `python -m teacher keys` made, or a copy of its clients/NAME"


@dataclass(frozen=True)
class ServerKeys:
    """Of the proxy. `allowed` are the public keys of clients and workers; `allowed_dir` is where they are read anew."""

    public: bytes
    secret: bytes
    allowed: tuple[bytes, ...]
    allowed_dir: Path | None = None

    def secure(self, socket: zmq.Socket) -> None:
        """Before it is bound. From then on nobody is let in but by a `Gatekeeper` of the same context."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        # Without a gatekeeper libzmq would let in whoever knows the server's public key; so it lets in nobody.
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True)
class ClientKeys:
    """Of a client, or of a worker."""

    server_public: bytes
    public: bytes
    secret: bytes

    def secure(self, socket: zmq.Socket) -> None:
        """Before it is connected."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


Keys = ServerKeys | ClientKeys


# --- reading them ----------------------------------------------------------------------------------------------------

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _explain_refused_access(read: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(read)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return read(*args, **kwargs)
        except OSError as error:
            raise TeacherError(
                f"the keys in {error.filename} cannot be read by user id {os.getuid()}: {error.strerror}; run this "
                "as the user who made them, or make a copy for this user"
            ) from None

    return explained


@_explain_refused_access
def server_keys(auth_dir: str | Path | None) -> ServerKeys | None:
    """None for None or "": a service without keys.

    Raises: TeacherError if a file is missing, damaged, or open to others.
    """
    if not auth_dir:
        return None
    require_curve()
    folder = _folder(auth_dir)
    public, secret = _read_pair(folder / "server.key_secret", f"of a server; {_MAKE_HINT}")
    allowed_dir = folder / "allowed"
    if not allowed_dir.is_dir():
        raise TeacherError(f"{allowed_dir} is missing: it holds the public keys of those who are let in; {_MAKE_HINT}")
    for path in (folder, allowed_dir):
        _refuse_open(path, 0o022, "written", "go-w")
    allowed = tuple(_read(path)[0] for path in sorted(allowed_dir.glob("*.key")))
    if not allowed:
        raise TeacherError(
            f"{allowed_dir} has no NAME.key: nobody would be let in; add a client with `python -m teacher keys "
            f"--auth-dir {folder} --client NAME`"
        )
    return ServerKeys(public, secret, allowed, allowed_dir)


@_explain_refused_access
def client_keys(auth_dir: str | Path | None) -> ClientKeys | None:
    """None for None or "": the service has no keys.

    Raises: TeacherError if a file is missing, damaged, or open to others.
    """
    if not auth_dir:
        return None
    require_curve()
    folder = _folder(auth_dir)
    if not (folder / "client.key_secret").exists() and (own := folder / "clients" / DEFAULT_CLIENT).is_dir():
        folder = own
    public, secret = _read_pair(folder / "client.key_secret", f"of a client; {_COPY_HINT}")
    return ClientKeys(_read(folder / "server.key")[0], public, secret)


def allowed_keys(folder: Path) -> dict[bytes, str]:
    """Public key -> name of those who are let in now. Unreadable files are left out."""
    found = {}
    with suppress(OSError):
        for path in folder.glob("*.key"):
            with suppress(TeacherError):  # being copied, perhaps; whoever needs it is refused, which is logged
                found[_read(path)[0]] = path.stem
    return found


def _folder(auth_dir: str | Path) -> Path:
    folder = Path(auth_dir).absolute()
    if not folder.is_dir():
        raise TeacherError(f"the folder of keys {folder} does not exist or is no folder; {_COPY_HINT}")
    return folder


def _read_pair(path: Path, whose: str) -> tuple[bytes, bytes]:
    """Public and secret key."""
    if not path.exists():
        raise TeacherError(f"{path} is missing: it holds the secret key {whose}")
    _refuse_open(path, 0o077, "read", "go=")
    public, secret = _read(path)
    if secret is None or zmq.curve_public(secret) != public:
        raise TeacherError(f"{path} is damaged: expected a public key and its secret key; restore it or make new keys")
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Public key, and secret key if the file has one: 40 characters of Z85 each."""
    if not path.exists():
        raise TeacherError(f"{path} is missing: it holds a public key; {_COPY_HINT}")
    try:
        public, secret = load_certificate(path)
        for key in (public, secret or public):
            if len(key) != 40:
                raise ValueError(f"a key has 40 characters, got {len(key)}")
            z85.decode(key)
    except (OSError, ValueError, KeyError, ArithmeticError, IndexError) as error:
        raise TeacherError(
            f"{path} is damaged or cannot be read: expected a key file of ZeroMQ's CURVE, got {error!r:.120}; restore "
            "it or make new keys"
        ) from None
    return public, secret


def _refuse_open(path: Path, bits: int, verb: str, repair: str) -> None:
    if (mode := path.stat().st_mode & 0o777) & bits:
        raise TeacherError(
            f"{path} can be {verb} by other users (mode {mode:03o}), so who is let in would not be up to you; expected "
            f"your access only: chmod {repair} {path}"
        )


def require_curve() -> None:
    if not zmq.has("curve"):
        raise TeacherError(
            "the libzmq of this Python was built without CURVE, so there are no keys; install a wheel of pyzmq from "
            "PyPI (pip install --force-reinstall pyzmq), or do without --auth-dir on a loopback address"
        )


# --- what may be bound without ---------------------------------------------------------------------------------------


def check_bind(bind: str, keys: ServerKeys | None) -> None:
    """Raise TeacherError if others than this machine could reach `bind` and there are no keys, or it is IPv6."""
    if ":" in bind:
        raise TeacherError(f"--bind {bind}: expected an IPv4 address or a name, such as 127.0.0.1 or 10.0.0.1")
    if keys is None and not is_loopback(bind):
        raise TeacherError(
            f"--bind {bind} can be reached from other machines, and without keys whoever reaches it could use, read "
            "and disturb this service. Make keys once and start with them:\n"
            "  python -m teacher keys --auth-dir DIR\n"
            f"  AUTH_DIR=DIR BIND={bind} teacher/start_server.sh ...\n"
            "Or serve this machine only: --bind 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether all addresses of `host`, a name or an IP, are of this machine alone. False if it has none."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)} if host not in ("", "*") else set()
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
