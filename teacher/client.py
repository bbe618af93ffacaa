"""The trainer's side: many requests in flight on one DEALER socket, each with its own deadline.

One background thread owns the socket; callers hand it encoded messages and get futures back. An answer that comes after
its request has expired finds no entry in the table and is dropped: there is no state that a late or lost answer could
spoil (the fate of a REQ socket), so the service may go away and come back while a client lives.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher import protocol
from teacher.errors import TeacherError, TeacherProtocolError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.messages import LIMITS, Answer, Failure, Info
from teacher.protocol import Frame
from teacher.records import TeacherAnswer, TeacherInfo, TeacherSequence
from teacher.sockets import CLIENT_HEARTBEAT, FRONTEND_PORT, LOOK_HINT, START_HINT, make_socket, receive, send

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0
_RESULT = TypeVar("_RESULT")


@dataclass(eq=False)
class _Request(Generic[_RESULT]):
    """One row of the table of requests in flight."""

    request_id: int
    future: Future[_RESULT]
    what: str
    timeout_s: float
    deadline: float  # time.monotonic()
    encode: Callable[[float], list[Frame]]  # remaining seconds -> frames, so that a request can be sent again


class TeacherClient:
    """Asks one teacher service. Thread-safe; use it as a context manager or call `close`.

    Not usable in a forked child (the thread stays with the parent): make a new client there.
    """

    def __init__(
        self, server_ip: str = "127.0.0.1", server_port: int = FRONTEND_PORT, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Connects in the background; a service that is not there yet shows in the first request.

        Args:
            timeout_s: deadline of each request that names none.

        Raises: TeacherError if the address is malformed.
        """
        self.address = f"tcp://{server_ip}:{server_port}"
        self._timeout_s = _checked_timeout_s(timeout_s)
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._outbox: queue.SimpleQueue[_Request[Any]] = queue.SimpleQueue()
        self._closing = False
        self._lock = threading.Lock()  # of `_closing` and the outbox: nothing enters after the thread's last look

        hint = "expected a host name or IP and a port, see actor_rollout_ref.teacher.server_ip/server_port"
        if not 1 <= server_port <= 65535:  # ZeroMQ takes any number, and then waits for ever
            raise TeacherError(f"cannot connect to {self.address}: a port is 1 to 65535; {hint}")
        self._context = zmq.Context()
        try:
            self._socket = make_socket(
                self._context, zmq.DEALER, max_frame_bytes=LIMITS.answer_frame_bytes, heartbeat=CLIENT_HEARTBEAT
            )
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TeacherError(f"cannot connect to {self.address}: {error}; {hint}") from None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="teacher-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """What the service is; waits for its first worker if there is none yet.

        Raises: TeacherUnavailable if nobody is there, or no worker registers, within `timeout_s`; TeacherTimeout if
            something takes the connection but never answers.
        """
        timeout_s = self._timeout_s if timeout_s is None else _checked_timeout_s(timeout_s)
        request_id = next(self._ids)
        future: Future[TeacherInfo] = Future()
        self._enqueue(request_id, future, "hello", timeout_s, lambda s: protocol.encode_hello(request_id, s))
        return future.result()  # bounded: the thread settles each future at its deadline

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[TeacherAnswer]]:
        """Have `sequences` scored as one request, with log_softmax(logits / temperature); the answers keep their order.

        A worker scores one temperature at a time: requests of another wait until it has finished those before them.

        Every failure of a request arrives through its future: TeacherRequestError (this request is at fault),
        TeacherTimeout, TeacherUnavailable, TeacherProtocolError. Callbacks of the future run in the I/O thread: keep
        them short.

        Raises: TeacherError only if the client is closed or belongs to another process.
        """
        request_id = next(self._ids)
        future: Future[list[TeacherAnswer]] = Future()
        future.set_running_or_notify_cancel()
        try:
            timeout_s = self._timeout_s if timeout_s is None else _checked_timeout_s(timeout_s)
            frames = protocol.encode_score(request_id, timeout_s, sequences, temperature)
        except TeacherRequestError as error:
            future.set_exception(error)
            return future
        what = f"scoring {len(sequences)} sequences"
        self._enqueue(request_id, future, what, timeout_s, lambda s: protocol.readdress(frames, request_id, s))
        return future

    def close(self) -> None:
        """Fail what is in flight, end the thread, free the socket. May be called twice."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()

    # --- callers' threads ---

    def _enqueue(
        self, request_id: int, future: Future[Any], what: str, timeout_s: float, encode: Callable[[float], list[Frame]]
    ) -> None:
        if os.getpid() != self._pid:
            raise TeacherError(f"this client belongs to process {self._pid}; make a new one in process {os.getpid()}")
        request = _Request(request_id, future, what, timeout_s, time.monotonic() + timeout_s, encode)
        with self._lock:
            if self._closing:
                raise TeacherError(f"the client of {self.address} is closed; make a new TeacherClient")
            self._outbox.put(request)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_sender.send(b"\0")

    # --- the I/O thread ---

    def _run(self) -> None:
        inflight: dict[int, _Request[Any]] = {}
        reason: Exception | None = None
        try:
            self._serve(inflight)
        except Exception as error:  # whatever it is, nobody may be left waiting
            logger.exception("the teacher client's I/O thread failed")
            reason = error
        finally:
            with self._lock:
                self._closing = True
            while not self._outbox.empty():
                request = self._outbox.get_nowait()
                inflight[request.request_id] = request
            why = f"I/O thread failed: {reason!r}" if reason else "closed by its owner"
            for request in inflight.values():
                request.future.set_exception(
                    TeacherUnavailable(f"{request.what}: the client of {self.address} ended before the answer ({why})")
                )
            self._socket.disable_monitor()
            self._context.destroy(linger=0)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _serve(self, inflight: dict[int, _Request[Any]]) -> None:
        deadlines: list[tuple[float, int]] = []
        connected = False
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_receiver):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            wait_s = max(0.0, deadlines[0][0] - time.monotonic()) if deadlines else None
            ready = dict(poller.poll(None if wait_s is None else int(wait_s * 1000) + 1))

            if self._monitor in ready:
                connected = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                # What waited for the service, and what a lost connection took along: scoring has no side effect, so it
                # is safe to ask again, and the proxy ignores a copy of a request that it has.
                for request in inflight.values() if connected else ():
                    self._send(request)

            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
                while not self._outbox.empty():
                    request = self._outbox.get_nowait()
                    inflight[request.request_id] = request
                    heapq.heappush(deadlines, (request.deadline, request.request_id))
                    if connected:
                        self._send(request)

            while (frames := receive(self._socket)) is not None:
                self._settle(frames, inflight)

            now = time.monotonic()
            while deadlines and deadlines[0][0] <= now:
                late = inflight.pop(heapq.heappop(deadlines)[1], None)
                if late is not None:
                    late.future.set_exception(self._too_late(late, connected))

    def _send(self, request: _Request[Any]) -> None:
        remaining_s = request.deadline - time.monotonic()
        # The proxy is given a little less: it knows why a request waits, so its own error should win the race.
        told_s = remaining_s - min(1.0, 0.25 * request.timeout_s)
        if told_s > 0:
            send(self._socket, request.encode(told_s))

    def _settle(self, frames: list[zmq.Frame], inflight: dict[int, _Request[Any]]) -> None:
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            request_id = protocol.peek_request_id(frames)
            request = inflight.pop(request_id, None) if request_id is not None else None
            if request is None:
                logger.warning("dropped a message from %s: %s", self.address, error)
            else:
                request.future.set_exception(TeacherProtocolError(f"{request.what} at {self.address}: {error}"))
            return
        if not isinstance(message, Answer | Info | Failure):
            logger.warning("dropped a %s message from %s", type(message).__name__, self.address)
            return
        request = inflight.pop(message.request_id, None)
        if request is None:
            return  # expired before
        if isinstance(message, Failure):
            request.future.set_exception(type(message.error)(f"{request.what} at {self.address}: {message.error}"))
        else:
            request.future.set_result(message.answers if isinstance(message, Answer) else message.info)

    def _too_late(self, request: _Request[Any], connected: bool) -> TeacherError:
        if connected:
            return TeacherTimeout(
                f"{request.what}: the teacher at {self.address} is connected but gave no answer within "
                f"{request.timeout_s:g} s; it may be slow (raise the timeout) or hang: {LOOK_HINT}"
            )
        return TeacherUnavailable(
            f"{request.what}: no teacher service at {self.address}, waited {request.timeout_s:g} s; {START_HINT}"
        )


def _checked_timeout_s(timeout_s: float) -> float:
    if not 0 < timeout_s <= LIMITS.timeout_s:
        raise TeacherRequestError(f"timeout_s must be above 0 and at most {LIMITS.timeout_s:.0f}, got {timeout_s!r}")
    return float(timeout_s)
