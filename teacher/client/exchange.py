"""The client's I/O thread: it owns the socket and settles every call, by its answers or at its deadline.

An answer that comes after its request has expired, or was cancelled, finds no entry in the table and is dropped: there
is no state that a late or lost answer could spoil (the fate of a REQ socket), so the service may go away and come back
while a client lives.
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
from teacher.errors import TeacherError, TeacherProtocolError, TeacherTimeout, TeacherUnavailable
from teacher.wire import protocol
from teacher.wire.connection import Connection
from teacher.wire.frames import Frame
from teacher.wire.messages import Failure, Info, Probe, RetryLater, ScoreReply, Status
from teacher.wire.sockets import DIAGNOSIS_HINT

logger = logging.getLogger(__name__)

# For the service to be told that nobody waits any more.
_FAREWELL_MS = 100


class Exchange:
    """Calls go in from any thread; what comes of them arrives in their futures."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self._connection = connection
        self._inflight = InFlight()
        self._pid = os.getpid()
        self._next_id = 1
        self._inbox: queue.SimpleQueue[Call[Any] | range] = queue.SimpleQueue()  # a range: of cancelled requests
        self._closing = False
        self._lock = threading.Lock()  # of the ids, of `_closing` and the inbox: nothing enters after the last look
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="teacher-client", daemon=True)
        self._thread.start()

    # --- callers' threads ---

    def start(self, call: Call[Any]) -> None:
        """Raises: TeacherError if the client is closed or belongs to another process."""
        if os.getpid() != self._pid:
            raise TeacherError(f"this client belongs to process {self._pid}; make a new one in process {os.getpid()}")
        with self._lock:
            if self._closing:
                raise TeacherError(f"the client of {self.address} is closed; make a new TeacherClient")
            call.request_ids = range(self._next_id, self._next_id + call.n_requests)
            self._next_id += call.n_requests
            self._inbox.put(call)
        # Only the ids: a future that led back to itself would keep its arrays until a garbage collection.
        call.future.add_done_callback(functools.partial(self._on_done, call.request_ids))
        self._wake()

    def _on_done(self, request_ids: range, future: Future[Any]) -> None:
        if future.cancelled() and os.getpid() == self._pid:
            self._inbox.put(request_ids)
            self._wake()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake_sender.send(b"\0")

    # --- the I/O thread ---

    def _run(self) -> None:
        why = "closed by its owner"
        try:
            self._serve()
        except Exception as error:  # whatever it is, nobody may be left waiting
            logger.exception("the teacher client's I/O thread failed")
            why = f"I/O thread failed: {error!r}"
        finally:
            with self._lock:
                self._closing = True
            self._abandon(why)
            self._connection.close(_FAREWELL_MS if self._connection.is_up else 0)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _abandon(self, why: str) -> None:
        requests = self._inflight.open_requests()
        calls = [request.call for request in requests]
        while not self._inbox.empty():
            if isinstance(item := self._inbox.get_nowait(), Call):
                calls.append(item)
        for call in calls:
            ended = f"{call.what}: the client of {self.address} ended before the answer ({why})"
            call.fail(TeacherError(ended))
        with suppress(zmq.ZMQError):  # a broken socket may be why we are here
            for request in requests:
                if request.is_sent:
                    self._connection.send(protocol.encode_cancel(request.request_id))

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._connection.socket, self._connection.monitor, self._wake_receiver):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._wait_ms()))
            if self._connection.monitor in ready:
                self._on_event()
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
                self._take_calls()
            while (frames := self._connection.receive()) is not None:
                self._on_message(frames)
            now = time.monotonic()
            while (call := self._inflight.expired(now)) is not None:
                self._expire(call)
            self._connection.reconnect_if_due(now)
            for request in self._inflight.to_send(now):
                self._send(request, now)

    def _wait_ms(self) -> int | None:
        times = [t for t in (self._inflight.wake_at(), self._connection.reconnect_at) if t is not None]
        return int(1000 * max(0.0, min(times) - time.monotonic())) + 1 if times else None

    def _on_event(self) -> None:
        # Scoring has no side effect, so it is safe to ask again, and the proxy ignores a copy of a request that it has.
        if refusal := self._connection.read_event():
            logger.warning("%s", refusal)
        if self._connection.is_up:
            self._inflight.connected()
        else:
            self._inflight.disconnected()

    def _take_calls(self) -> None:
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, range):
                self._forget(item)
            else:
                self._inflight.add(item)

    def _send(self, request: Request, now: float) -> None:
        # The proxy is given a little less: it knows why a request waits, so its own error should win the race.
        told_s = request.call.deadline - now - min(1.0, 0.25 * request.call.timeout_s)
        if told_s > 0:
            self._connection.send(request.call.encode(request.request_id, told_s))

    def _on_message(self, frames: list[Frame]) -> None:
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            request = self._inflight.remove(protocol.peek_request_id(frames) or 0)
            if request is None:
                logger.warning("dropped a message from %s: %s", self.address, error)
            else:
                self._fail_with(request, error)
            return
        if isinstance(message, ScoreReply | Info | Status):
            if (request := self._inflight.remove(message.request_id)) is not None:
                try:
                    request.call.accept(request.request_id, message)
                except TeacherProtocolError as error:
                    self._fail_with(request, error)
        elif isinstance(message, Failure):
            if (request := self._inflight.remove(message.request_id)) is not None:
                self._fail_with(request, message.error)
        elif isinstance(message, RetryLater):
            self._inflight.put_off(message.request_id, message.reason, time.monotonic())
        elif not isinstance(message, Probe):
            logger.warning("dropped a %s message from %s", type(message).__name__, self.address)

    def _expire(self, call: Call[Any]) -> None:
        reasons = [request.put_off for request in self._forget(call.request_ids) if request.put_off]
        what, waited = call.what, f"{call.timeout_s:g} s"
        if not self._connection.is_up:
            call.fail(TeacherUnavailable(f"{what}: {self._connection.why_down()} (waited {waited})"))
        elif reasons:
            call.fail(
                TeacherTimeout(
                    f"{what}: the teacher at {self.address} put it off until its deadline, {waited}, because it was "
                    f"full or going down; it said: {reasons[0]}"
                )
            )
        else:
            call.fail(
                TeacherTimeout(
                    f"{what}: the teacher at {self.address} is connected but gave no answer within {waited}; it may "
                    f"be slow (raise the timeout) or hang: {DIAGNOSIS_HINT}"
                )
            )

    def _fail_with(self, request: Request, error: TeacherError) -> None:
        """`error` is what the service said about one request, or what is wrong with its answer."""
        call = request.call
        text = call.explain(request.request_id, str(error))
        self._fail(call, type(error)(f"{call.what} at {self.address}: {text}"))

    def _fail(self, call: Call[Any], error: TeacherError) -> None:
        self._forget(call.request_ids)
        call.fail(error)

    def _forget(self, request_ids: range) -> list[Request]:
        """Nobody waits for these any more: those that were open, of which the service is told."""
        requests = [request for i in request_ids if (request := self._inflight.remove(i)) is not None]
        for request in requests:
            if request.call.future.cancelled():
                request.call.end_canceled()
            if request.is_sent:
                self._connection.send(protocol.encode_cancel(request.request_id))
        return requests
