"""Who is let in at the doors of a proxy that has keys, and who was sent away, in the log."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from teacher.logs import Seldom
from teacher.wire.auth import ZAP_DOMAIN, ServerKeys, allowed_keys

logger = logging.getLogger(__name__)


class Gatekeeper:
    """Lets in those whose key is allowed, for all sockets of a context that have `keys`, and logs who was refused.

    Make it before the sockets are bound; close it before the context is ended. Keys that are added to `allowed_dir`
    or taken from it count within a second; a connection that was let in stays until it ends.
    """

    def __init__(
        self, context: zmq.Context, keys: ServerKeys | None, watched: Mapping[str, zmq.Socket] | None = None
    ) -> None:
        """Args:
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
        self.configure_curve_callback(ZAP_DOMAIN.decode(), self)

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
