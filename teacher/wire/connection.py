"""A client's or a worker's way to its proxy: one DEALER socket, and what its monitor tells about it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher.errors import TeacherError
from teacher.wire import auth
from teacher.wire.frames import Frame
from teacher.wire.messages import LIMITS
from teacher.wire.sockets import (
    CLIENT_HEARTBEAT,
    HANDSHAKE_TIMEOUT_S,
    START_HINT,
    WORKER_HEARTBEAT,
    Heartbeat,
    make_socket,
    receive,
    send,
)

# libzmq connects again by itself, except after what it takes for a mistake that will not go away: a refused key,
# another security mechanism, bytes that are no ZeroMQ. A service can be restarted without the mistake.
RECONNECT_AFTER_REFUSAL_S = 1.0
RECONNECT_AFTER_LOSS_S = CLIENT_HEARTBEAT.timeout_s

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class Side:
    """Who connects to a proxy."""

    max_frame_bytes: int
    heartbeat: Heartbeat
    has_name: bool
    """It keeps a name over a lost connection, by which the proxy knows what it has of it."""
    address_hint: str
    start_hint: str


CLIENT = Side(
    LIMITS.answer_frame_bytes,
    CLIENT_HEARTBEAT,
    has_name=True,
    address_hint="expected a host name or IP and a port, see actor_rollout_ref.teacher.server_ip/server_port",
    start_hint=START_HINT,
)
WORKER = Side(
    LIMITS.request_frame_bytes,
    WORKER_HEARTBEAT,
    has_name=False,
    address_hint="expected a host name or IP and a port, see SERVER_IP and PROXY_BACKEND_PORT",
    start_hint="start it with teacher/start_server.sh, or set SERVER_IP / PROXY_BACKEND_PORT to where it runs",
)


class Connection:
    """To be used by one thread at a time. `socket` and `monitor` are for polling."""

    def __init__(self, side: Side, server_ip: str, server_port: int, auth_dir: str | Path | None) -> None:
        """Connects in the background.

        Raises: TeacherError if the address is malformed or keys are missing.
        """
        self.address = f"tcp://{server_ip}:{server_port}"
        self.is_up = False
        self._side, self._auth_dir = side, auth_dir
        self._refusal, self._refused_at = "", 0.0
        self.reconnect_at: float | None = None  # time.monotonic()
        if not 1 <= server_port <= 65535:  # ZeroMQ takes any number, and then waits for ever
            raise TeacherError(f"cannot connect to {self.address}: a port is 1 to 65535; {side.address_hint}")
        keys = auth.client_keys(auth_dir)
        self._context = zmq.Context()
        try:
            self.socket = make_socket(
                self._context,
                zmq.DEALER,
                max_frame_bytes=side.max_frame_bytes,
                heartbeat=side.heartbeat,
                keys=keys,
                routing_id=b"c" + os.urandom(15) if side.has_name else b"",
            )
            self.monitor = self.socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES
            )
            self.socket.connect(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TeacherError(f"cannot connect to {self.address}: {error}; {side.address_hint}") from None

    def send(self, frames: list[Frame]) -> None:
        """Without a connection it waits for one, or is lost: what matters is sent again when there is one."""
        with suppress(zmq.Again):
            send(self.socket, frames)

    def receive(self) -> list[zmq.Frame] | None:
        return receive(self.socket)

    def read_event(self) -> str:
        """Take what the monitor has. Returns why the service refuses this client, if that is news; else nothing."""
        event = recv_monitor_message(self.monitor)
        kind, now = event["event"], time.monotonic()
        self.is_up = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_up:
            self._refusal, self.reconnect_at = "", None
        elif kind == zmq.EVENT_DISCONNECTED:
            self.reconnect_at = self.reconnect_at or now + RECONNECT_AFTER_LOSS_S
        else:
            return self._note_refusal(kind, event["value"], now)
        return ""

    def _note_refusal(self, kind: int, value: int, now: float) -> str:
        before, self._refused_at = self._refusal, now
        if kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.reconnect_at = now + RECONNECT_AFTER_REFUSAL_S
        elif before:  # the same thing, perhaps, and what is known of it says more
            return ""
        self._refusal = _explain_refusal(kind, value, self.address, self._auth_dir)
        return self._refusal if self._refusal != before else ""

    def reconnect_if_due(self, now: float) -> None:
        if self.reconnect_at is None or now < self.reconnect_at:
            return
        self.reconnect_at = now + RECONNECT_AFTER_LOSS_S
        with suppress(zmq.ZMQError):  # libzmq has dropped the address itself
            self.socket.disconnect(self.address)
        self.socket.connect(self.address)

    def why_down(self) -> str:
        """A sentence for somebody who waited in vain."""
        # Refusals come again and again; after an old one there was nobody to refuse.
        if self._refusal and time.monotonic() - self._refused_at < 2 * HANDSHAKE_TIMEOUT_S:
            return self._refusal
        return f"no teacher service at {self.address}; {self._side.start_hint}"

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=linger_ms)


def _explain_refusal(kind: int, value: int, address: str, auth_dir: str | Path | None) -> str:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        what = "refused this client's key"
        do = "make one there with `python -m teacher keys --client NAME` and copy its clients/NAME here"
    elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        what = "speaks another security mechanism"
        do = "start it with --auth-dir, or leave auth_dir out" if auth_dir else "copy its clients/NAME here"
    else:  # also, half of the time, the other mechanism: whoever sees that first ends the connection
        what = "ended the connection during the handshake"
        do = "see whether address and port are right; if they are, " + (
            "the keys are of another service (copy clients/NAME of this one), or this one has none (leave auth_dir out)"
            if auth_dir
            else "it may ask for keys (copy its clients/NAME here)"
        )
    got, expected = (
        (f"auth_dir={str(auth_dir)!r}", "a key from the service's own --auth-dir")
        if auth_dir
        else ("no auth_dir", "a service without keys")
    )
    return f"the service at {address} {what}: got {got}, expected {expected}; {do}"
