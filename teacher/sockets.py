"""How every ZeroMQ socket of the service is made: one place for limits, lingering, and whatever secures it."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from teacher.messages import LIMITS
from teacher.protocol import Frame

FRONTEND_PORT = 15555
BACKEND_PORT = 15556

START_HINT = (
    "start it with teacher/start_server.sh, or set actor_rollout_ref.teacher.server_ip/server_port to where it runs"
)
LOOK_HINT = "see worker-*.log and proxy.log in the RUN_DIR of start_server.sh, and ask `python -m teacher check`"

# Between proxy and workers. libzmq's own thread asks and answers, so neither a long engine step nor the GIL looks like
# death; but it counts whole frames, so one array has to cross the network within the timeout (600 MB at 1 Gbit/s).
HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0


def make_socket(context: zmq.Context, kind: int, *, max_frame_bytes: int, heartbeat: bool = False) -> zmq.Socket:
    """A DEALER or ROUTER. A peer that sends a frame above `max_frame_bytes` is disconnected before it is read.

    With `heartbeat`, so is a peer whose process, machine or network is silent for HEARTBEAT_TIMEOUT_S.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # No high-water mark: at the mark a ROUTER drops silently and a DEALER blocks. What may be on its way is bounded
    # where it is known: by the proxy's queue and by each worker's capacity.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    if heartbeat:
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_INTERVAL_S))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * HEARTBEAT_TIMEOUT_S))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that has gone is an error, not a loss
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

    Raises: zmq.ZMQError (EHOSTUNREACH) on a ROUTER whose peer has gone.
    """
    socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
