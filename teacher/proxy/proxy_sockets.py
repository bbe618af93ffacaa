"""The two ROUTER sockets of a proxy, for clients and for workers, and their authentication."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field

import zmq

from teacher.errors import TeacherError, TeacherSetupError
from teacher.proxy.curve_authenticator import CurveAuthenticator
from teacher.wire.auth import ServerKeys, check_bind
from teacher.wire.frames import Frame
from teacher.wire.limits import LIMITS
from teacher.wire.sockets import CLIENT_HEARTBEAT, WORKER_HEARTBEAT, make_socket, send

logger = logging.getLogger(__name__)

MAX_UNREAD_REPLIES = 8
"""Messages that ZeroMQ queues for a client that does not read."""
MAX_IO_THREADS = 64
_CLOSE_LINGER_MS = 1000


def default_io_threads() -> int:
    """Return the number of libzmq's I/O threads: one per core, at most 4."""
    return min(4, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class SocketSettings:
    """Security and threads of a proxy's sockets.

    Attributes:
        keys: CURVE keys, None for plain connections.
        trusted_network: True to allow plain connections on addresses that other machines can reach.
        io_threads: Threads of libzmq that read, write, encrypt and decrypt. libzmq assigns each accepted connection to
            the thread with the fewest connections (``ctx.cpp``, ``choose_io_thread``), so one socket uses all threads.
            With keys, encryption limits a thread to several hundred MB/s.
    """

    keys: ServerKeys | None = None
    trusted_network: bool = False
    io_threads: int = field(default_factory=default_io_threads)


class ProxySockets:
    """Bound sockets of a proxy.

    Attributes:
        frontend: ROUTER for clients.
        backend: ROUTER for workers.
        frontend_port: Port for clients.
    """

    def __init__(self, bind: str, frontend_port: int, backend_port: int, settings: SocketSettings) -> None:
        """Bind both sockets.

        Args:
            bind: IPv4 address or interface.
            frontend_port: Port for clients, 0 for a free one.
            backend_port: Port for workers, 0 for a free one.
            settings: Security and threads.

        Raises:
            TeacherSetupError: An address cannot be bound, or must not be bound without keys.
        """
        keys = settings.keys
        check_bind(bind, keys, trusted_network=settings.trusted_network)
        self._context = zmq.Context(io_threads=settings.io_threads)
        self._authenticator: CurveAuthenticator | None = None
        try:
            self.frontend = make_socket(
                self._context,
                zmq.ROUTER,
                max_frame_bytes=LIMITS.request_frame_bytes,
                heartbeat=CLIENT_HEARTBEAT,
                keys=keys,
                send_high_water=MAX_UNREAD_REPLIES,
            )
            self.backend = make_socket(
                self._context,
                zmq.ROUTER,
                max_frame_bytes=LIMITS.reply_frame_bytes,
                heartbeat=WORKER_HEARTBEAT,
                keys=keys,
            )
            self._authenticator = CurveAuthenticator(
                self._context, keys, {"client": self.frontend, "worker": self.backend}
            )
            self.frontend_port = _bind(self.frontend, bind, frontend_port)
            self.backend_port = _bind(self.backend, bind, backend_port)
        except (TeacherError, zmq.ZMQError, OSError):
            self.close(linger_ms=0)
            raise

    def close(self, linger_ms: int = _CLOSE_LINGER_MS) -> None:
        """Close the sockets.

        Args:
            linger_ms: Time for queued messages to be sent, in milliseconds.
        """
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy(linger=linger_ms)


def _bind(socket: zmq.Socket, bind: str, port: int) -> int:
    """Bind a socket and return its port."""
    try:
        address = "127.0.0.1" if bind == "localhost" else bind  # libzmq accepts addresses and interfaces, but no names
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        what = f"cannot listen on {bind}:{port}: {error.strerror}"
        options: tuple[str, ...] = ("--frontend-port", "--backend-port")
        remedy = "choose another with PROXY_FRONTEND_PORT / PROXY_BACKEND_PORT"
        if error.errno == errno.EADDRINUSE:
            remedy = f"stop the process that uses the port (teacher/stop_server.sh), or {remedy}"
        elif error.errno == errno.EACCES:
            what += ", only root may listen on this port"
        else:
            what += ", expected an address or interface of this machine"
            options, remedy = ("--bind",), "correct --bind (BIND)"
        raise TeacherSetupError(what, address=f"tcp://{bind}:{port}", options=options, remedy=remedy) from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def peer_name(frames: list[zmq.Frame]) -> str:
    """Return the address of the sender of a received message, "unknown" if there is none."""
    try:
        return str(frames[-1].get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown"


def send_to_peer(socket: zmq.Socket, identity: bytes, frames: list[Frame]) -> bool:
    """Send a message to a peer of a ROUTER. A message to a peer that does not read is dropped.

    Returns:
        False if the peer is disconnected.
    """
    try:
        send(socket, [identity, *frames])
    except zmq.Again:
        return True
    except zmq.ZMQError as error:
        logger.debug("cannot reach peer %s: %s", identity.hex(), error)
        return False
    return True
