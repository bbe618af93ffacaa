"""How every ZeroMQ socket of the service is made: one place for limits, lingering, and whatever secures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from teacher.wire.auth import Keys
from teacher.wire.frames import Frame
from teacher.wire.messages import LIMITS

FRONTEND_PORT = 15555
BACKEND_PORT = 15556

START_HINT = (
    "start it with teacher/start_server.sh, or set actor_rollout_ref.teacher.server_ip/server_port to where it runs"
)
LOOK_HINT = "see worker-*.log and proxy.log in the RUN_DIR of start_server.sh, and ask `python -m teacher status`"

# A peer that begins a connection and does not get through the handshake is sent away after this.
HANDSHAKE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Heartbeat:
    """A peer whose process, machine or network is silent for `timeout_s` is disconnected.

    libzmq's own thread asks and answers, so neither a long engine step nor the GIL looks like death; but it counts
    whole frames, so one array has to cross the network within the timeout.
    """

    interval_s: float
    timeout_s: float


WORKER_HEARTBEAT = Heartbeat(1.0, 5.0)
CLIENT_HEARTBEAT = Heartbeat(5.0, 30.0)


def make_socket(
    context: zmq.Context,
    kind: int,
    *,
    max_frame_bytes: int,
    heartbeat: Heartbeat,
    keys: Keys | None = None,
    send_high_water: int = 0,
    routing_id: bytes = b"",
) -> zmq.Socket:
    """A DEALER or ROUTER that is not yet bound or connected.

    Args:
        max_frame_bytes: a peer that sends a larger frame is disconnected before it is read.
        send_high_water: messages that may wait for one peer: at the mark a ROUTER raises zmq.Again. 0: no mark; what
            may be on its way is then bounded where it is known, by the proxy's queue and by each worker's capacity.
        routing_id: what a DEALER is called by its ROUTER. A name that lasts over a lost connection.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, send_high_water)
    socket.setsockopt(zmq.RCVHWM, 1000)  # a peer that sends faster than we read has to wait
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_TIMEOUT_S))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * heartbeat.interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * heartbeat.timeout_s))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that has gone is an error, not a loss
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that comes back takes over its name from its old connection
    if routing_id:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
    if keys is not None:
        keys.secure(socket)
    return socket


def receive(socket: zmq.Socket) -> list[zmq.Frame] | None:
    """The next whole message without waiting, or None. Frames beyond the protocol's limit are read and dropped.

    On a ROUTER the first frame is the identity, hence one more.
    """
    try:
        frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    frame = frames[0]
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= LIMITS.frames + 1:  # one too many is kept, so that decoding sees the message as too long
            frames.append(frame)
    return frames


def send(socket: zmq.Socket, frames: Sequence[Frame]) -> None:
    """Queue a message for the peer; array frames are not copied.

    Raises: on a ROUTER, zmq.ZMQError (EHOSTUNREACH) if the peer has gone, zmq.Again if it does not read.
    """
    socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
