"""I/O thread of the client: it owns the socket and resolves every call, by a reply or at its deadline.

A reply to a request that has expired or was canceled finds no entry in the table and is dropped. No other state
depends on it, so the service can restart while a client lives.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import zmq

from teacher.client.calls import Call
from teacher.client.inflight import InFlight, Request
from teacher.errors import TeacherClosed, TeacherError, TeacherProtocolError, TeacherTimeout
from teacher.wire import protocol
from teacher.wire.connection import Connection
from teacher.wire.frames import Frame
from teacher.wire.messages import AsleepSet, Cancel, Failure, Info, Probe, RetryLater, ScoreReply, Status
from teacher.wire.sockets import DIAGNOSIS_HINT

logger = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 100  # time to deliver the cancellations
_MAX_REPLY_MARGIN_S = 1.0


class ClientIOThread:
    """Thread that exchanges messages with the service. Calls are started from any thread.

    Attributes:
        address: ZeroMQ address of the service.
    """

    def __init__(self, connection: Connection) -> None:
        """Start the thread, which takes over ``connection``."""
        self.address = connection.address
        self._connection = connection
        self._inflight = InFlight()
        self._answered: Call[Any] | None = None  # call of the last reply
        self._pid = os.getpid()
        self._next_id = 1
        self._inbox: queue.SimpleQueue[Call[Any] | range] = queue.SimpleQueue()  # a range: ids of a canceled call
        self._closing = False
        self._lock = threading.Lock()  # of ids, `_closing` and the inbox: no call enters after the last read
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="teacher-client", daemon=True)
        self._thread.start()

    # --- callers' threads ---

    def start(self, call: Call[Any]) -> None:
        """Assign request ids to a call and pass it to the thread.

        Raises:
            TeacherClosed: The client is closed or belongs to another process.
        """
        if os.getpid() != self._pid:
            raise TeacherClosed(
                f"this client belongs to process {self._pid}", remedy=f"make a new one in process {os.getpid()}"
            )
        with self._lock:
            if self._closing:
                raise TeacherClosed(
                    f"the client of {self.address} is closed", address=self.address, remedy="make a new TeacherClient"
                )
            call.request_ids = range(self._next_id, self._next_id + call.n_requests)
            self._next_id += call.n_requests
            self._inbox.put(call)
        # Pass only the ids: a reference cycle through the future would keep its arrays until a garbage collection.
        call.future.add_done_callback(functools.partial(self._on_done, call.request_ids))
        self._wake()

    def _on_done(self, request_ids: range, future: Future[Any]) -> None:
        if future.cancelled() and os.getpid() == self._pid:
            self._inbox.put(request_ids)
            self._wake()

    def close(self) -> None:
        """Fail the open calls and end the thread. Without effect in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread is awake already; closed: it has ended
            self._wake_sender.send(b"\0")

    # --- the I/O thread ---

    def _run(self) -> None:
        reason = "closed by its owner"
        try:
            self._serve()
        except Exception as error:  # an unexpected error must still resolve all futures
            logger.exception("the teacher client's I/O thread failed")
            reason = f"I/O thread failed: {error!r}"
        finally:
            with self._lock:
                self._closing = True
            self._fail_all(reason)
            self._connection.close(_CLOSE_LINGER_MS if self._connection.is_up else 0)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _fail_all(self, reason: str) -> None:
        requests = self._inflight.open_requests()
        calls = [request.call for request in requests]
        if self._answered is not None:  # its reply may be the reason, and its request is not open any more
            calls.append(self._answered)
        while not self._inbox.empty():
            if isinstance(item := self._inbox.get_nowait(), Call):
                calls.append(item)
        for call in calls:
            what = f"the client ended before the reply arrived ({reason})"
            call.fail(TeacherClosed(what, operation=call.description, address=self.address))
        with suppress(zmq.ZMQError):  # a broken socket may be the reason
            for request in requests:
                if request.is_sent:
                    self._connection.send(protocol.encode(Cancel(request.request_id)))

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._connection.socket, self._connection.monitor, self._wake_receiver):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._poll_timeout_ms()))
            if self._connection.monitor in ready:
                self._on_connection_event()
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
                self._read_inbox()
            while (frames := self._connection.receive()) is not None:
                self._on_message(frames)
                self._answered = None  # a reference would keep its arrays
            now = time.monotonic()
            while (call := self._inflight.expired(now)) is not None:
                self._expire(call)
            self._connection.reconnect_if_due(now)
            for request in self._inflight.to_send(now):
                self._send(request, now)

    def _poll_timeout_ms(self) -> int | None:
        times = [t for t in (self._inflight.wake_at(), self._connection.reconnect_at) if t is not None]
        return int(1000 * max(0.0, min(times) - time.monotonic())) + 1 if times else None

    def _on_connection_event(self) -> None:
        if refusal := self._connection.read_event():
            logger.warning("%s", refusal)
        if self._connection.is_up:
            # All open requests are sent again. That is safe: scoring has no side effect, and the proxy ignores copies.
            self._inflight.on_connect()
        else:
            self._inflight.on_disconnect()

    def _read_inbox(self) -> None:
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, range):
                self._drop(item)
            else:
                self._inflight.add(item)

    def _send(self, request: Request, now: float) -> None:
        # The proxy gets a slightly shorter limit. Its own error names the reason and should arrive before ours.
        margin_s = min(_MAX_REPLY_MARGIN_S, 0.25 * request.call.timeout_s)
        service_timeout_s = request.call.deadline - now - margin_s
        if service_timeout_s > 0:
            self._connection.send(request.call.encode(request.request_id, service_timeout_s))

    def _on_message(self, frames: list[Frame]) -> None:
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            request = self._take(protocol.peek_request_id(frames) or 0)
            if request is None:
                logger.warning("dropped a message from %s: %s", self.address, error)
            else:
                self._fail_call(request, error)
            return
        if isinstance(message, ScoreReply | Info | Status | AsleepSet):
            if (request := self._take(message.request_id)) is not None:
                try:
                    request.call.accept(request.request_id, message)
                except TeacherProtocolError as error:
                    self._fail_call(request, error)
        elif isinstance(message, Failure):
            if (request := self._take(message.request_id)) is not None:
                self._fail_call(request, request.call.locate_error(request.request_id, message.error))
        elif isinstance(message, RetryLater):
            self._inflight.defer(message.request_id, message.reason, time.monotonic())
        elif not isinstance(message, Probe):
            logger.warning("dropped a %s message from %s", type(message).__name__, self.address)

    def _take(self, request_id: int) -> Request | None:
        """Remove and return the request of a reply. Return None if it is not open."""
        request = self._inflight.remove(request_id)
        self._answered = request.call if request is not None else None
        return request

    def _expire(self, call: Call[Any]) -> None:
        reasons = [request.defer_reason for request in self._drop(call.request_ids) if request.defer_reason]
        waited = f"{call.timeout_s:g} s"
        error: TeacherError
        if not self._connection.is_up:
            outage = self._connection.outage()
            error = outage.replaced(remedy=f"{outage.remedy} (waited {waited})")
        elif reasons:
            error = TeacherTimeout(
                f"the teacher deferred the request until its deadline of {waited}, because it was full or stopping: "
                f"{reasons[0]}",
                stage="deferred",
            )
        else:
            error = TeacherTimeout(
                f"the teacher is connected but did not reply within {waited}: it may be slow or hang",
                stage="sent",
                remedy=f"raise the timeout, or {DIAGNOSIS_HINT}",
            )
        call.fail(error.replaced(operation=call.description, address=self.address))

    def _fail_call(self, request: Request, error: TeacherError) -> None:
        """Fail the call of a request with the service's error, or with the defect of its reply."""
        self._drop(request.call.request_ids)
        request.call.fail(error.replaced(operation=request.call.description, address=self.address))

    def _drop(self, request_ids: range) -> list[Request]:
        """Remove the requests that are still open, cancel them at the service, and return them."""
        requests = [request for i in request_ids if (request := self._inflight.remove(i)) is not None]
        for request in requests:
            if request.call.future.cancelled():
                request.call.confirm_cancellation()
            if request.is_sent:
                self._connection.send(protocol.encode(Cancel(request.request_id)))
        return requests
