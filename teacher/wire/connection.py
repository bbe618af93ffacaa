"""Connection of a client or worker to its proxy: one DEALER socket and its monitor.

======================  ==========================================  ==============================================
state                   event                                       next state
======================  ==========================================  ==============================================
down                    handshake succeeded                         up
down                    handshake failed (keys, protocol)           down; reconnect after RECONNECT_AFTER_REFUSAL_S
down                    handshake ended without a detail            down; libzmq reconnects
up                      disconnected                                down; reconnect after RECONNECT_AFTER_LOSS_S
======================  ==========================================  ==============================================

libzmq reconnects by itself, except after errors that it regards as permanent: a refused key, another security
mechanism, or bytes that are not ZeroMQ. A restarted service may no longer have them, so the connection is renewed here.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher.errors import TeacherSetupError, TeacherUnreachable
from teacher.wire import auth
from teacher.wire.frames import Frame
from teacher.wire.limits import LIMITS
from teacher.wire.sockets import (
    CLIENT_HEARTBEAT,
    HANDSHAKE_TIMEOUT_S,
    START_HINT,
    WORKER_HEARTBEAT,
    HeartbeatSettings,
    make_socket,
    receive,
    send,
)

RECONNECT_AFTER_REFUSAL_S = 1.0
RECONNECT_AFTER_LOSS_S = CLIENT_HEARTBEAT.timeout_s

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class PeerRole:
    """Role of the connecting side: client or worker.

    Attributes:
        max_frame_bytes: Largest frame that it accepts.
        heartbeat: Heartbeat settings.
        keeps_identity: True if it keeps its identity after a lost connection. The proxy then recognizes its requests.
        address_options: Names of the settings with the address.
        start_hint: Advice if there is no proxy at the address.
        auth_dir_name: Name of the setting with the folder of keys, for messages.
    """

    max_frame_bytes: int
    heartbeat: HeartbeatSettings
    keeps_identity: bool
    address_options: tuple[str, ...]
    start_hint: str
    auth_dir_name: str = "auth_dir"


CLIENT = PeerRole(
    max_frame_bytes=LIMITS.reply_frame_bytes,
    heartbeat=CLIENT_HEARTBEAT,
    keeps_identity=True,
    address_options=("actor_rollout_ref.teacher.server_ip", "actor_rollout_ref.teacher.server_port"),
    start_hint=START_HINT,
)
COMMAND = replace(
    CLIENT,
    address_options=("--server-ip", "--port"),
    start_hint=(
        "start it with teacher/start_server.sh, or set --server-ip and --port (PROXY_FRONTEND_PORT) to where it runs"
    ),
    auth_dir_name="--auth-dir",
)
"""Client of a command of ``python -m teacher``."""
WORKER = PeerRole(
    max_frame_bytes=LIMITS.request_frame_bytes,
    heartbeat=WORKER_HEARTBEAT,
    keeps_identity=False,
    address_options=("SERVER_IP", "PROXY_BACKEND_PORT"),
    start_hint="start it with teacher/start_server.sh, or set SERVER_IP / PROXY_BACKEND_PORT to where it runs",
)


class Connection:
    """Connection to a proxy, for one thread at a time.

    Lifecycle::

        connection = Connection(CLIENT, "127.0.0.1", 15555, auth_dir=None)  # connects in the background
        poller.register(connection.socket); poller.register(connection.monitor)
        connection.read_event()                                  # when the monitor is readable
        connection.reconnect_if_due(time.monotonic())            # in every round of the loop
        connection.close(linger_ms=100)

    Attributes:
        address: Address of the proxy.
        is_up: True after a successful handshake.
        socket: DEALER socket.
        monitor: Socket that receives libzmq's connection events.
        reconnect_at: Time of the next reconnection by ``time.monotonic()``, None if none is due.
    """

    def __init__(
        self, role: PeerRole, server_ip: str, server_port: int, auth_dir: str | Path | auth.ClientKeys | None
    ) -> None:
        """Start to connect.

        Args:
            role: ``CLIENT`` or ``WORKER``.
            server_ip: Host name or IP of the proxy.
            server_port: Port of the proxy for this role.
            auth_dir: Folder of keys, or the keys; None for a service without keys.

        Raises:
            TeacherSetupError: The address is malformed, or keys are missing.
        """
        self.address = f"tcp://{server_ip}:{server_port}"
        self.is_up = False
        self._role = role
        self._refusal: TeacherUnreachable | None = None
        self._refused_at = 0.0
        self.reconnect_at: float | None = None
        if not 1 <= server_port <= 65535:  # ZeroMQ accepts every number and then never connects
            raise self._address_error("a port is 1 to 65535")
        keys = auth.client_keys(auth_dir)
        self._auth_dir = None if keys is None else keys.folder
        self._context = zmq.Context()
        try:
            self.socket = make_socket(
                self._context,
                zmq.DEALER,
                max_frame_bytes=role.max_frame_bytes,
                heartbeat=role.heartbeat,
                keys=keys,
                routing_id=b"c" + os.urandom(15) if role.keeps_identity else b"",
            )
            self.monitor = self.socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES
            )
            self.socket.connect(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise self._address_error(str(error)) from None

    def _address_error(self, reason: str) -> TeacherSetupError:
        options = self._role.address_options
        return TeacherSetupError(
            f"cannot connect to {self.address}: {reason}, expected a host name or IP and a port",
            address=self.address,
            options=options,
            remedy=f"correct {' or '.join(options)}",
        )

    def send(self, frames: list[Frame]) -> None:
        """Send a message. Without a connection it waits for one or is lost; callers repeat important messages."""
        with suppress(zmq.Again):
            send(self.socket, frames)

    def receive(self) -> list[zmq.Frame] | None:
        """Return the next complete message without waiting, None if there is none."""
        return receive(self.socket)

    def read_event(self) -> TeacherUnreachable | None:
        """Process one monitor event.

        Returns:
            A new error if the service refuses this peer, else None.
        """
        event = recv_monitor_message(self.monitor)
        kind, now = event["event"], time.monotonic()
        self.is_up = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_up:
            self._refusal, self.reconnect_at = None, None
        elif kind == zmq.EVENT_DISCONNECTED:
            self.reconnect_at = self.reconnect_at or now + RECONNECT_AFTER_LOSS_S
        else:
            return self._note_refusal(kind, event["value"], now)
        return None

    def _note_refusal(self, kind: int, value: int, now: float) -> TeacherUnreachable | None:
        before, self._refused_at = self._refusal, now
        if kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self.reconnect_at = now + RECONNECT_AFTER_REFUSAL_S
        elif before:  # probably the same cause, and the earlier reason has more detail
            return None
        self._refusal = _refusal_error(kind, value, self.address, self._auth_dir, name=self._role.auth_dir_name)
        return None if before is not None and before.what == self._refusal.what else self._refusal

    def reconnect_if_due(self, now: float) -> None:
        """Renew the connection if ``reconnect_at`` has passed.

        Args:
            now: Current time by ``time.monotonic()``.
        """
        if self.reconnect_at is None or now < self.reconnect_at:
            return
        self.reconnect_at = now + RECONNECT_AFTER_LOSS_S
        with suppress(zmq.ZMQError):  # libzmq may have dropped the address itself
            self.socket.disconnect(self.address)
        self.socket.connect(self.address)

    def outage(self) -> TeacherUnreachable:
        """Return the error that explains why there is no connection."""
        # A present service repeats its refusal, so an old refusal means that there is no service any more.
        if self._refusal and time.monotonic() - self._refused_at < 2 * HANDSHAKE_TIMEOUT_S:
            return self._refusal
        return TeacherUnreachable(
            f"no teacher service at {self.address}", address=self.address, remedy=self._role.start_hint
        )

    def close(self, linger_ms: int) -> None:
        """Close the sockets.

        Args:
            linger_ms: Time for queued messages to be sent, in milliseconds.
        """
        self.socket.disable_monitor()
        self._context.destroy(linger=linger_ms)


def _refusal_error(kind: int, value: int, address: str, auth_dir: str | None, *, name: str) -> TeacherUnreachable:
    copy = f"copy its clients/NAME here and set {name} to the copy"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        refusal, problem = "key", "refused this client's key"
        remedy = "make one there with `python -m teacher keys --client NAME` and copy its clients/NAME here"
    elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        refusal, problem = "mechanism", "uses another security mechanism"
        remedy = f"start it with keys, or leave {name} out" if auth_dir else copy
    else:  # A mechanism mismatch also arrives here if the other side detects it first and disconnects.
        refusal, problem = "handshake", "ended the connection during the handshake"
        remedy = "check address and port; if they are right, " + (
            f"the keys are of another service (copy clients/NAME of this one), or this one has none (leave {name} out)"
            if auth_dir
            else f"it may require keys ({copy})"
        )
    got, expected = (
        (f"{name}={auth_dir!r}", "a key from the service's own folder of keys")
        if auth_dir
        else (f"no {name}", "the folder of a key of this service")
    )
    if not auth_dir:
        problem = f"may require keys, and this client has none (it {problem})"
    return TeacherUnreachable(
        f"the service at {address} {problem}: got {got}, expected {expected}",
        address=address,
        options=(name,),
        refusal=refusal,
        auth_dir=Path(auth_dir) if auth_dir else None,
        remedy=remedy,
    )
