"""The two addresses of a proxy, for clients and for workers, and who is let in."""

from __future__ import annotations

import errno

import zmq

from teacher.errors import TeacherError
from teacher.proxy.gatekeeper import Gatekeeper
from teacher.wire.auth import ServerKeys, check_bind
from teacher.wire.messages import LIMITS
from teacher.wire.sockets import CLIENT_HEARTBEAT, WORKER_HEARTBEAT, make_socket

UNREAD_ANSWERS = 8
"""Messages that ZeroMQ keeps for one client that does not read."""
_FAREWELL_MS = 1000


class Doors:
    """Open once constructed; `close` lets what was sent go out, for a second at most."""

    def __init__(self, bind: str, frontend_port: int, backend_port: int, keys: ServerKeys | None) -> None:
        """Port 0 takes a free one. Raises: TeacherError if an address cannot, or must not, be bound."""
        check_bind(bind, keys)
        self._context = zmq.Context()
        self._gatekeeper: Gatekeeper | None = None
        try:
            self.frontend = make_socket(
                self._context,
                zmq.ROUTER,
                max_frame_bytes=LIMITS.request_frame_bytes,
                heartbeat=CLIENT_HEARTBEAT,
                keys=keys,
                send_high_water=UNREAD_ANSWERS,
            )
            self.backend = make_socket(
                self._context,
                zmq.ROUTER,
                max_frame_bytes=LIMITS.answer_frame_bytes,
                heartbeat=WORKER_HEARTBEAT,
                keys=keys,
            )
            self._gatekeeper = Gatekeeper(self._context, keys, {"client": self.frontend, "worker": self.backend})
            self.frontend_port = _bind(self.frontend, bind, frontend_port)
            self.backend_port = _bind(self.backend, bind, backend_port)
        except (TeacherError, zmq.ZMQError, OSError):
            self.close(linger_ms=0)
            raise

    def close(self, linger_ms: int = _FAREWELL_MS) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.destroy(linger=linger_ms)


def _bind(socket: zmq.Socket, bind: str, port: int) -> int:
    """The port."""
    try:
        address = "127.0.0.1" if bind == "localhost" else bind  # libzmq takes addresses and interfaces, no names
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        another = "choose another with PROXY_FRONTEND_PORT / PROXY_BACKEND_PORT"
        hint = {
            errno.EADDRINUSE: f"stop what uses the port (teacher/stop_server.sh), or {another}",
            errno.EACCES: f"only root may listen on this port; {another}",
        }.get(error.errno or 0, "correct --bind (BIND): expected an address or interface of this machine")
        raise TeacherError(f"cannot listen on {bind}:{port}: {error.strerror}; {hint}") from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def peer_name(frames: list[zmq.Frame]) -> str:
    """Where a message that was received came from."""
    try:
        return str(frames[-1].get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown"
