"""CURVE: who may talk to a service, and that nobody else can listen or change what is said.

The server knows the public keys that it lets in; a client or a worker knows the server's. A key is 40
characters of Z85. A folder of keys, as `teacher.make_keys` makes it:

    DIR/server.key, server.key_secret     of the proxy
    DIR/allowed/NAME.key                  whom it lets in
    DIR/clients/NAME/                     what the machine of a trainer or worker needs: copy it there
        server.key, client.key, client.key_secret

DIR serves as the folder of a client too: it then is `clients/default`.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from teacher.errors import TeacherError
from teacher.logs import Seldom

logger = logging.getLogger(__name__)

DEFAULT_CLIENT = "default"
_ZAP_DOMAIN = b"teacher"
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
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
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
    """Raise TeacherError if others than this machine could reach `bind` and there are no keys."""
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


# --- the door --------------------------------------------------------------------------------------------------------


class Gatekeeper:
    """Lets in those whose key is allowed, for all sockets of a context that have `keys`, and logs who was refused.

    Make it before the sockets are bound; close it before the context is ended. Keys that are added to `allowed_dir`
    or taken from it count within a second; a connection that was let in stays until it ends.
    """

    def __init__(
        self, context: zmq.Context, keys: ServerKeys | None, watched: Mapping[str, zmq.Socket] | None = None
    ) -> None:
        """
        Args:
            keys: without, everybody is let in.
            watched: sockets, by who connects to them ("client"), whose failed handshakes are logged too: of peers
                that use no keys or those of another service, that do not speak ZeroMQ, or that never finish.
        """
        self._authenticator = _Authenticator(context, keys) if keys is not None else None
        if self._authenticator is not None:
            self._authenticator.start()
        refusals = Seldom()
        self._doors = [_Door(who, sock, keys is not None, refusals) for who, sock in (watched or {}).items()]
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="teacher-gatekeeper", daemon=True)
        self._thread.start()

    def __enter__(self) -> Gatekeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """From now on nobody is let in. May be called twice."""
        if self._authenticator is not None:
            self._authenticator.stop()
        with suppress(OSError):  # closed before
            self._wake_sender.send(b"\0")
        self._thread.join()
        for door in self._doors:
            door.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _watch(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_receiver, *(door.monitor for door in self._doors)):
            poller.register(source, zmq.POLLIN)
        while self._wake_receiver.fileno() not in (ready := dict(poller.poll())):
            for door in self._doors:
                if door.monitor in ready:
                    door.note(recv_monitor_message(door.monitor))


class _Authenticator(ThreadAuthenticator):
    """pyzmq's, asked for each handshake that uses CURVE, on its own thread."""

    def __init__(self, context: zmq.Context, keys: ServerKeys) -> None:
        super().__init__(context, log=logging.getLogger(f"{__name__}.zap"))
        self._keys, self._refusals = keys, Seldom()
        self._names, self._read_at = dict.fromkeys(keys.allowed, "a client"), -1.0
        self._address = ""
        self.configure_curve_callback(_ZAP_DOMAIN.decode(), self)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        self._address = msg[3].decode("ascii", "replace") if len(msg) > 3 else "unknown address"
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether to let in the peer at `_address`. Called by pyzmq."""
        if self._keys.allowed_dir is not None and (now := time.monotonic()) >= self._read_at + 1.0:
            self._names, self._read_at = allowed_keys(self._keys.allowed_dir), now
        if key in self._names:
            logger.debug("let in %s from %s", self._names[key], self._address)
            return True
        if n := self._refusals.count(f"{self._address} unknown key"):
            logger.warning(
                "refused %s: its public key %s is not in %s; see `python -m teacher keys --client`%s",
                *(
                    self._address,
                    key.decode("ascii", "replace"),
                    self._keys.allowed_dir or "the allowed ones",
                    _times(n),
                ),
            )
        return False


class _Door:
    """What libzmq says of one socket's connections. It names who it was only when it is over."""

    _EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )

    def __init__(self, who: str, watched: zmq.Socket, has_keys: bool, refusals: Seldom) -> None:
        self._who, self._watched, self._has_keys, self._refusals = who, watched, has_keys, refusals
        self._addresses: dict[int, str] = {}  # by file descriptor
        self._failure: str | None = None
        self.monitor = watched.get_monitor_socket(self._EVENTS)

    def note(self, event: Mapping[str, Any]) -> None:
        kind, value = event["event"], int(event["value"])
        if kind == zmq.EVENT_ACCEPTED:
            self._addresses[value] = _address_of(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failure = self._explain(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            hint = " (has it no keys, or those of another service?)" if self._has_keys else ""
            self._failure = f"it ended the connection during the handshake{hint}, or did not finish that in time"
        elif kind == zmq.EVENT_DISCONNECTED:
            address, failure = self._addresses.pop(value, "unknown address"), self._failure
            self._failure = None
            if failure is not None and (n := self._refusals.count(f"{address} {failure}")):
                logger.warning("refused %s as a %s: %s%s", address, self._who, failure, _times(n))

    def _explain(self, code: int) -> str:
        if code == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._has_keys:
                return "it uses no keys; start it with --auth-dir (a trainer: actor_rollout_ref.teacher.auth_dir)"
            return "it uses keys, and this service has none; start the service with --auth-dir, or it without"
        if self._has_keys and code == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "it has the keys of another service; copy clients/NAME of this one's --auth-dir to it"
        return f"it does not keep to ZeroMQ's handshake (error {code:#x})"

    def close(self) -> None:
        if not self.monitor.closed:
            self._watched.disable_monitor()
            self.monitor.close(linger=0)


def _address_of(descriptor: int) -> str:
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return "unknown address"  # gone already


def _times(n: int) -> str:
    return f" ({n} times since the last mention)" if n > 1 else ""
