"""Targets that send mutated bytes to a real proxy process: as client, as worker, over HTTP, and below ZeroMQ."""

from __future__ import annotations

import socket
import time

from fuzzing import seeds
from fuzzing.mutations import set_request_id
from fuzzing.proxy_process import Peer, ProxyProcess, ValidClient, WorkerThread
from fuzzing.targets import HANG_S, Defect, Frames, Hang
from teacher.errors import TeacherProtocolError
from teacher.wire import protocol
from teacher.wire.messages import (
    AsleepSet,
    Failure,
    Hello,
    Message,
    Reregister,
    Score,
    ScoreReply,
    SetAsleep,
    StatusRequest,
    Welcome,
)

_CHECK_INPUTS = 100
"""Inputs after which a valid request must be served."""
_RENEWAL_INPUTS = 2000
"""Inputs after which the fuzzing peer connects anew. The proxy then cancels the requests of the old one."""
_BARRIER_ID = 1 << 45
_WAIT_S = 20.0
_HANDSHAKE_S = 0.002
"""Time for the proxy's part of a handshake."""
_GREETING_BYTES = 64
_POLL_S = 0.02


def _is_valid(frames: Frames) -> bool:
    try:
        protocol.decode(frames)
    except TeacherProtocolError:
        return False
    return True


class ProxyTarget:
    """Base of the targets: a proxy, and the check that it still serves.

    Attributes:
        seeds: Valid inputs.
    """

    is_message, is_stateful = True, True
    has_worker, limit_s = True, HANG_S

    def __init__(self, inputs: list[Frames]) -> None:
        """Start the proxy."""
        self.seeds = inputs
        self._n_inputs = self._n_earlier_arcs = 0
        self._open()

    def _open(self) -> None:
        self._proxy = ProxyProcess()
        self._worker = WorkerThread(self._proxy.backend_port) if self.has_worker else None
        self._valid = ValidClient(self._proxy.port)
        self._open_peer()

    def _open_peer(self) -> None:
        """Open the connection that sends the inputs."""

    def _close_peer(self) -> None:
        """Close it."""

    def _send(self, frames: Frames) -> bool:
        """Send an input, and return when the proxy has handled it: True if it was accepted."""
        raise NotImplementedError

    def run(self, frames: Frames) -> bool:
        """Send an input, and check the proxy at intervals.

        Raises:
            Hang: The proxy took longer than ``limit_s``, or does not answer at all.
            Defect: The proxy ended, or refused a valid request.
        """
        self._n_inputs += 1
        began = time.monotonic()
        try:
            accepted = self._send(frames)
            if time.monotonic() - began > self.limit_s:
                raise Hang(f"the proxy took {time.monotonic() - began:.1f} s for an input")
            if self._n_inputs % _CHECK_INPUTS == 0:
                self.check()
        except (Hang, OSError):
            self._proxy.ensure_alive()
            raise
        if self._n_inputs % _RENEWAL_INPUTS == 0:
            self._close_peer()
            self._open_peer()
        return accepted

    def check(self) -> None:
        """Check that the proxy serves a valid request."""
        self._proxy.ensure_alive()
        self._valid.status()
        if self._worker is not None:
            if not self._worker.is_alive():
                raise Defect("the worker ended because of a message that the proxy passed on")
            self._valid.score()

    def n_arcs(self) -> int:
        """Return the largest number of arcs of one proxy process."""
        self._n_earlier_arcs = max(self._n_earlier_arcs, self._proxy.n_arcs())
        return self._n_earlier_arcs

    def resident_bytes(self) -> int | None:
        """Return the memory of the proxy."""
        return self._proxy.resident_bytes()

    def reset(self) -> None:
        """Replace the proxy."""
        self.n_arcs()
        self.close()
        self._open()

    def close(self) -> None:
        """End the proxy and its peers."""
        self._close_peer()
        self._valid.close()
        if self._worker is not None:
            self._worker.close()
        self._proxy.close()


class ClientSideTarget(ProxyTarget):
    """Messages of a client. A status request follows each, whose reply shows that the message was handled."""

    name = "proxy_client"

    def __init__(self) -> None:
        """Start the proxy and a worker."""
        super().__init__(seeds.from_clients())

    def _open_peer(self) -> None:
        self._peer = Peer(self._proxy.port)

    def _close_peer(self) -> None:
        self._peer.close()

    def _send(self, frames: Frames) -> bool:
        barrier_id = _BARRIER_ID + self._n_inputs
        self._peer.send(set_request_id(frames or [b""], seeds.REQUEST_ID, self._n_inputs))
        self._peer.send(protocol.encode(StatusRequest(barrier_id, 5.0)))
        self._peer.wait_for(lambda message: getattr(message, "request_id", 0) == barrier_id, _WAIT_S)
        return _is_valid(frames)


class WorkerSideTarget(ProxyTarget):
    """Messages of a worker that has a request. A message that workers do not send follows each, which is refused."""

    name, has_worker = "proxy_worker", False

    def __init__(self) -> None:
        """Start the proxy."""
        super().__init__(seeds.from_workers())

    def _open_peer(self) -> None:
        self._peer = Peer(self._proxy.backend_port)
        self._is_registered, self._job_id, self._request_id = False, 0, 0

    def _close_peer(self) -> None:
        self._peer.close()
        self._valid.cancel(self._request_id)

    def _send(self, frames: Frames) -> bool:
        self._ensure_job()
        self._peer.send(set_request_id(frames or [b""], seeds.REQUEST_ID, self._job_id))
        self._barrier()
        return _is_valid(frames)

    def _ensure_job(self) -> None:
        """Register again if the last input ended the registration, and get a request if there is none."""
        deadline = time.monotonic() + _WAIT_S
        while not self._is_registered or not self._job_id:
            if time.monotonic() > deadline:
                raise Hang("a worker could not register, or got no request")
            if not self._is_registered:
                self._peer.send([bytes(frame) for frame in protocol.encode(seeds.READY)])
                self._is_registered, self._job_id = True, 0
                self._barrier()
            if not self._job_id:
                self._drop_answered_request()
                if not self._request_id:
                    self._valid.wake()  # a mutated Ready may have let the service sleep
                    self._request_id = self._valid.submit()
                message = self._peer.receive(_POLL_S)
                if message is not None:
                    self._follow(message)
                else:
                    self._is_registered = False  # a mutated Goodbye has no reply

    def _drop_answered_request(self) -> None:
        """Forget the open request and its job if the client has the reply."""
        if self._request_id and self._valid.has_reply(self._request_id):
            self._job_id = self._request_id = 0

    def _barrier(self) -> None:
        """Wait until the proxy has read everything before."""
        barrier_id = _BARRIER_ID + self._n_inputs
        self._peer.send(protocol.encode(Hello(barrier_id, 5.0)))
        _, others = self._peer.wait_for(lambda message: getattr(message, "request_id", 0) == barrier_id, _WAIT_S)
        for message in others:
            self._follow(message)
        self._drop_answered_request()

    def _follow(self, message: Message) -> None:
        """Update the state of the worker by a message of the proxy."""
        if isinstance(message, Reregister) or (isinstance(message, Failure) and message.request_id == 0):
            self._is_registered = False
        elif isinstance(message, Score):
            self._job_id = message.request_id
        elif isinstance(message, Welcome):
            self._is_registered, self._job_id = True, 0
        elif isinstance(message, SetAsleep):
            self._peer.send(protocol.encode(AsleepSet(message.request_id, asleep=message.asleep, n_workers=1)))

    def check(self) -> None:
        """Check the status, and that a valid worker can register and score."""
        self._proxy.ensure_alive()
        self._valid.status()
        self._is_registered = False
        self._ensure_job()
        frames = protocol.encode(ScoreReply(self._job_id, seeds.scores(seeds.SEQUENCES)))
        self._peer.send(frames)
        self._barrier()
        deadline = time.monotonic() + _WAIT_S
        while self._request_id and not self._valid.has_reply(self._request_id):
            if time.monotonic() > deadline:
                raise Hang("a client got no reply although its request was scored")
        self._job_id = self._request_id = 0


class HandshakeTarget(ProxyTarget):
    """Bytes on the client port, below ZeroMQ. Another client must be served in the meantime.

    An input can contain 35,000 messages of two bytes, so the time until the end of its connection has another limit.
    """

    name, is_message, limit_s = "proxy_handshake", False, 10.0

    def __init__(self) -> None:
        """Start the proxy and a worker."""
        super().__init__(seeds.zmtp(b"DEALER"))

    def _send(self, frames: Frames) -> bool:
        # More than the greeting: the handshake was accepted. It is not answered after the end of the sending direction.
        response = exchange(self._proxy.port, frames, answer_s=_HANDSHAKE_S)
        began = time.monotonic()
        self._valid.status()
        if time.monotonic() - began > HANG_S:
            raise Hang("another client was not served")
        return len(response) > _GREETING_BYTES


class HttpTarget(ProxyTarget):
    """HTTP requests. A response 5xx is a finding, except for 503, which reports the state of the service."""

    name, is_message = "proxy_http", False

    def __init__(self) -> None:
        """Start the proxy and a worker."""
        super().__init__(seeds.http())

    def _send(self, frames: Frames) -> bool:
        response = exchange(self._proxy.http_port, frames)
        line = response.partition(b"\r\n")[0]
        if not line.startswith(b"HTTP/"):  # a response to HTTP/0.9 has no status
            return False
        if line[9:10] == b"5" and line[9:12] != b"503":
            raise Defect(f"the response was {line[:60]!r}")
        return line[9:12] == b"200"

    def check(self) -> None:
        """Check that the service is healthy."""
        super().check()
        response = exchange(self._proxy.http_port, [b"GET /healthz HTTP/1.1\r\n\r\n"])
        if b" 200 " not in response[:16]:
            raise Defect(f"/healthz answered {response[:100]!r}")


def exchange(port: int, frames: Frames, answer_s: float = 0.0) -> bytes:
    """Send bytes to a TCP port, end the sending direction, and return everything until the peer closes.

    Args:
        port: Port.
        frames: Bytes to send.
        answer_s: Time to wait for an answer before the sending direction is ended, in seconds.

    Raises:
        Hang: The peer does not close the connection.
    """
    received, deadline = b"", time.monotonic() + _WAIT_S
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as connection:
        try:
            for frame in frames:
                connection.sendall(frame)
            if answer_s:
                time.sleep(answer_s)
            connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline:
                if not (data := connection.recv(1 << 16)):
                    return received
                received += data
        except TimeoutError:
            pass
        except OSError:  # the peer may close the connection before it has read everything
            return received
    raise Hang("the connection was not closed")
