"""Creation and use of the service's ZeroMQ sockets, with their limits, heartbeats and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from teacher.wire.auth import Keys
from teacher.wire.frames import Frame
from teacher.wire.limits import LIMITS

FRONTEND_PORT = 15555
BACKEND_PORT = 15556

START_HINT = (
    "start it with teacher/start_server.sh, or set actor_rollout_ref.teacher.server_ip/server_port to where it runs"
)
DIAGNOSIS_HINT = "see worker-*.log and proxy.log in the RUN_DIR of start_server.sh, and run `python -m teacher status`"

HANDSHAKE_TIMEOUT_S = 5.0
"""Time that a peer has to finish the handshake before it is disconnected, in seconds."""

_RECEIVE_HIGH_WATER_MESSAGES = 1000
_KEEPALIVE_IDLE_S = 30


@dataclass(frozen=True)
class HeartbeatSettings:
    """Settings of libzmq's heartbeats.

    A thread of libzmq sends and answers them, so neither a long engine step nor the GIL delays them. libzmq counts
    whole frames as signs of life, so each array must cross the network within the timeout.

    Attributes:
        interval_s: Time between two heartbeats, in seconds.
        timeout_s: Silence after which a peer is disconnected, in seconds.
    """

    interval_s: float
    timeout_s: float


WORKER_HEARTBEAT = HeartbeatSettings(1.0, 5.0)
CLIENT_HEARTBEAT = HeartbeatSettings(5.0, 30.0)


def make_socket(
    context: zmq.Context,
    kind: int,
    *,
    max_frame_bytes: int,
    heartbeat: HeartbeatSettings,
    keys: Keys | None = None,
    send_high_water: int = 0,
    routing_id: bytes = b"",
) -> zmq.Socket:
    """Create a socket that is not yet bound or connected.

    Args:
        context: ZeroMQ context.
        kind: ``zmq.DEALER`` or ``zmq.ROUTER``.
        max_frame_bytes: Frame size above which the sender is disconnected before the frame is read.
        heartbeat: Heartbeat settings.
        keys: Keys, None for a plain connection.
        send_high_water: Messages that may wait for one peer before a ROUTER raises ``zmq.Again``. 0 for no limit; the
            proxy's queue and the workers' capacity then bound the messages.
        routing_id: Identity of a DEALER at its ROUTER, which survives a lost connection.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, send_high_water)
    socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER_MESSAGES)  # a faster sender must wait
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_TIMEOUT_S))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * heartbeat.interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * heartbeat.timeout_s))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected peer raises
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer takes over its identity
    if routing_id:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
    if keys is not None:
        keys.secure(socket)
    return socket


def receive(socket: zmq.Socket) -> list[zmq.Frame] | None:
    """Return the next complete message without waiting, None if there is none.

    Frames beyond the protocol's limit are dropped. On a ROUTER the first frame is the sender's identity.
    """
    try:
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    frame = frames[0]
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= LIMITS.frames + 1:  # one excess frame is kept, so that decoding refuses the message
            frames.append(frame)
    return frames


def send(socket: zmq.Socket, frames: Sequence[Frame]) -> None:
    """Queue a message for its peer. Array frames are not copied.

    Raises:
        zmq.Again: On a ROUTER: the peer does not read.
        zmq.ZMQError: On a ROUTER: the peer is disconnected (EHOSTUNREACH).
    """
    socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
