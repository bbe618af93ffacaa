"""Authentication of the proxy's peers by CURVE keys, and log messages about refused peers."""

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

from teacher.logs import LogRateLimiter
from teacher.wire.auth import ZAP_DOMAIN, ServerKeys, allowed_keys

logger = logging.getLogger(__name__)

_KEY_RELOAD_INTERVAL_S = 1.0


class CurveAuthenticator:
    """Authenticator of all CURVE sockets of a ZeroMQ context.

    Changes of ``allowed_dir`` take effect within a second. Established connections are not closed.

    Lifecycle::

        authenticator = CurveAuthenticator(context, keys, {"client": router})  # before the sockets are bound
        router.bind(...)
        authenticator.close()                                                  # before the context is destroyed
    """

    def __init__(
        self, context: zmq.Context, keys: ServerKeys | None, monitored: Mapping[str, zmq.Socket] | None = None
    ) -> None:
        """Start the threads.

        Args:
            context: Context of the sockets.
            keys: Keys of the server. None accepts every peer.
            monitored: Sockets by the role of their peers ("client"). Failed handshakes on them are logged: of peers
                without keys, with keys of another service, or that do not use ZeroMQ or never finish.
        """
        self._zap_handler = _ZapHandler(context, keys) if keys is not None else None
        if self._zap_handler is not None:
            self._zap_handler.start()
        log_limiter = LogRateLimiter()
        self._monitors = [
            _HandshakeMonitor(role, monitored_socket, keys is not None, log_limiter)
            for role, monitored_socket in (monitored or {}).items()
        ]
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="teacher-authenticator", daemon=True)
        self._thread.start()

    def __enter__(self) -> CurveAuthenticator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Refuse new connections and end the threads. May be called twice."""
        if self._zap_handler is not None:
            self._zap_handler.stop()
        with suppress(OSError):  # closed before
            self._wake_sender.send(b"\0")
        self._thread.join()
        for monitor in self._monitors:
            monitor.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_receiver, *(monitor.socket for monitor in self._monitors)):
            poller.register(source, zmq.POLLIN)
        while self._wake_receiver.fileno() not in (ready := dict(poller.poll())):
            for monitor in self._monitors:
                if monitor.socket in ready:
                    monitor.process_event(recv_monitor_message(monitor.socket))


class _ZapHandler(ThreadAuthenticator):
    """Thread of pyzmq that decides about every CURVE handshake."""

    def __init__(self, context: zmq.Context, keys: ServerKeys) -> None:
        super().__init__(context, log=logging.getLogger(f"{__name__}.zap"))
        self._keys, self._log_limiter = keys, LogRateLimiter()
        self._names, self._names_read_at = dict.fromkeys(keys.allowed, "a client"), -_KEY_RELOAD_INTERVAL_S
        self._address = ""
        self.configure_curve_callback(ZAP_DOMAIN.decode(), self)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Store the peer's address for ``callback``, then handle the request."""
        self._address = msg[3].decode("ascii", "replace") if len(msg) > 3 else "unknown address"
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the peer with this public key may connect. Called by pyzmq."""
        now = time.monotonic()
        if self._keys.allowed_dir is not None and now >= self._names_read_at + _KEY_RELOAD_INTERVAL_S:
            self._names, self._names_read_at = allowed_keys(self._keys.allowed_dir), now
        if key in self._names:
            logger.debug("accepted %s from %s", self._names[key], self._address)
            return True
        if n := self._log_limiter.count(f"{self._address} unknown key"):
            logger.warning(
                "refused %s: its public key %s is not in %s; see `python -m teacher keys --client`%s",
                self._address,
                key.decode("ascii", "replace"),
                self._keys.allowed_dir or "the allowed keys",
                _repetitions(n),
            )
        return False


class _HandshakeMonitor:
    """Log messages about the failed handshakes of one socket.

    libzmq reports the failure without an address, and the address later with the end of the connection.
    """

    _EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )

    def __init__(self, role: str, monitored: zmq.Socket, has_keys: bool, log_limiter: LogRateLimiter) -> None:
        self._role, self._monitored, self._has_keys, self._log_limiter = role, monitored, has_keys, log_limiter
        self._address_of_descriptor: dict[int, str] = {}
        self._failure: str | None = None
        self.socket = monitored.get_monitor_socket(self._EVENTS)

    def process_event(self, event: Mapping[str, Any]) -> None:
        """Process one event of the monitor socket."""
        kind, value = event["event"], int(event["value"])
        if kind == zmq.EVENT_ACCEPTED:
            self._address_of_descriptor[value] = _address_of(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failure = self._explain(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            hint = " (it may have no keys, or the keys of another service)" if self._has_keys else ""
            self._failure = f"it ended the connection during the handshake{hint}, or did not finish it in time"
        elif kind == zmq.EVENT_DISCONNECTED:
            address, failure = self._address_of_descriptor.pop(value, "unknown address"), self._failure
            self._failure = None
            if failure is not None and (n := self._log_limiter.count(f"{address} {failure}")):
                logger.warning("refused %s as a %s: %s%s", address, self._role, failure, _repetitions(n))

    def _explain(self, code: int) -> str:
        if code == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._has_keys:
                return "it uses no keys; start it with --auth-dir (a trainer: actor_rollout_ref.teacher.auth_dir)"
            return "it uses keys, and this service has none; start the service with --auth-dir, or the peer without"
        if self._has_keys and code == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "it has the keys of another service; copy clients/NAME of this service's --auth-dir to it"
        return f"it violates ZeroMQ's handshake (error {code:#x}); check that it is a teacher client or worker"

    def close(self) -> None:
        """Stop the monitor. May be called twice."""
        if not self.socket.closed:
            self._monitored.disable_monitor()
            self.socket.close(linger=0)


def _address_of(descriptor: int) -> str:
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):  # already disconnected
        return "unknown address"


def _repetitions(n: int) -> str:
    return f" ({n} times since the last log message)" if n > 1 else ""
