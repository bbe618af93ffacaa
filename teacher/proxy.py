"""The one address of a teacher service: clients in front, workers behind, requests queued between.

A single-threaded loop around two ROUTER sockets. It reads headers only; token ids and logprobs pass through untouched.
What it decides is in `dispatch`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import zmq

from teacher import protocol
from teacher.dispatch import MAX_WAITING, Dispatcher
from teacher.errors import TeacherError, TeacherProtocolError, TeacherTimeout, TeacherUnavailable
from teacher.messages import LIMITS, PROTOCOL_VERSION, Answer, Bye, Failure, Hello, Ready, Score
from teacher.protocol import Frame
from teacher.records import TeacherInfo
from teacher.sockets import (
    BACKEND_PORT,
    CLIENT_HEARTBEAT,
    FRONTEND_PORT,
    LOOK_HINT,
    WORKER_HEARTBEAT,
    Heartbeat,
    make_socket,
    receive,
    send,
)
from teacher.stop_signal import Stoppable

logger = logging.getLogger(__name__)

# Messages taken from one socket before the other gets its turn.
_BURST = 64
_FAREWELL_MS = 1000
_LOST = f"the last one died or hung: its connection ended, or was silent for {WORKER_HEARTBEAT.timeout_s:g} s"


class Proxy:
    """Binds on construction. `run` serves until it is told to stop, then tells every waiting client."""

    def __init__(
        self, bind: str = "127.0.0.1", frontend_port: int = FRONTEND_PORT, backend_port: int = BACKEND_PORT
    ) -> None:
        """Port 0 takes a free one; `frontend_port` and `backend_port` then say which.

        Raises: TeacherError if an address cannot be bound.
        """
        self._dispatcher = Dispatcher()
        self._hellos: list[tuple[bytes, int, float]] = []  # (client, request id, deadline), until a worker is there
        self._next_probe = 0.0  # time.monotonic()
        self._context = zmq.Context()
        try:
            self._frontend, self.frontend_port = self._bind(
                bind, frontend_port, LIMITS.request_frame_bytes, CLIENT_HEARTBEAT
            )
            self._backend, self.backend_port = self._bind(
                bind, backend_port, LIMITS.answer_frame_bytes, WORKER_HEARTBEAT
            )
        except TeacherError:
            self._context.destroy(linger=0)
            raise

    def _bind(self, bind: str, port: int, max_frame_bytes: int, heartbeat: Heartbeat) -> tuple[zmq.Socket, int]:
        socket = make_socket(self._context, zmq.ROUTER, max_frame_bytes=max_frame_bytes, heartbeat=heartbeat)
        try:
            socket.bind(f"tcp://{bind}:{port or '*'}")
        except zmq.ZMQError as error:
            raise TeacherError(
                f"cannot listen on {bind}:{port}: {error}; stop what uses the port (teacher/stop_server.sh), choose "
                "another with PROXY_FRONTEND_PORT / PROXY_BACKEND_PORT, or correct --bind"
            ) from None
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def run(self, stop: Stoppable) -> None:
        poller = zmq.Poller()
        for source in (self._frontend, self._backend, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        try:
            while stop.fileno() not in (ready := dict(poller.poll(self._wait_ms()))):
                # Answers first: they free the workers that new requests need.
                if self._backend in ready:
                    self._drain(self._backend, self._on_worker)
                if self._frontend in ready:
                    self._drain(self._frontend, self._on_client)
                self._expire()
                self._probe_workers()
                self._assign()
        finally:
            self._close()

    def _wait_ms(self) -> int | None:
        deadlines = [deadline for _, _, deadline in self._hellos]
        if (next_job := self._dispatcher.next_deadline()) is not None:
            deadlines.append(next_job)
        if self._dispatcher.workers:
            deadlines.append(self._next_probe)
        return int(1000 * max(0.0, min(deadlines) - time.monotonic())) + 1 if deadlines else None

    def _drain(self, socket: zmq.Socket, handle: Callable[[bytes, list[Frame]], None]) -> None:
        for _ in range(_BURST):
            if (frames := receive(socket)) is None:
                return
            identity, *body = frames
            try:
                handle(identity.bytes, body)
            except TeacherProtocolError as error:
                logger.warning("dropped a message from %s: %s", identity.bytes.hex(), error)
                if (request_id := protocol.peek_request_id(body)) is not None:
                    self._send(socket, identity.bytes, protocol.encode_error(request_id, error))

    # --- clients ---

    def _on_client(self, client: bytes, frames: list[Frame]) -> None:
        message = protocol.decode(frames)
        now = time.monotonic()
        if isinstance(message, Score):
            try:
                self._dispatcher.add_job(
                    (client, message.request_id), frames, message.n_tokens, now + message.timeout_s
                )
            except TeacherUnavailable as error:
                self._to_client((client, message.request_id), protocol.encode_error(message.request_id, error))
        elif isinstance(message, Hello):
            self._hellos.append((client, message.request_id, now + message.timeout_s))
            del self._hellos[:-MAX_WAITING]  # nobody sane waits that many times; memory stays bounded
            self._answer_hellos()
        else:
            raise TeacherProtocolError(
                f"a client cannot send {type(message).__name__}; is this a worker on the wrong port?"
            )

    def _answer_hellos(self) -> None:
        if (model := self._dispatcher.info) is None:
            return
        info = TeacherInfo(**asdict(model), protocol_version=PROTOCOL_VERSION, n_workers=len(self._dispatcher.workers))
        for client, request_id, _ in self._hellos:
            self._to_client((client, request_id), protocol.encode_info(request_id, info))
        self._hellos.clear()

    def _expire(self) -> None:
        now = time.monotonic()
        for job, started in self._dispatcher.expire(now):
            error: TeacherError
            if started:
                error = TeacherTimeout(
                    "a worker had the request but did not finish it in time; it may be slow (raise the timeout, add "
                    f"workers) or its engine may hang: {LOOK_HINT}"
                )
            elif self._dispatcher.workers:
                n_workers = len(self._dispatcher.workers)
                error = TeacherTimeout(f"all {n_workers} workers were busy until the deadline; add workers or time")
            else:
                error = self._no_worker()
            self._to_client(job.client, protocol.encode_error(job.client[1], error))
        for client, request_id, deadline in self._hellos:
            if deadline <= now:
                self._to_client((client, request_id), protocol.encode_error(request_id, self._no_worker()))
        self._hellos = [hello for hello in self._hellos if hello[2] > now]

    def _no_worker(self) -> TeacherUnavailable:
        return TeacherUnavailable(
            f"the proxy has no worker ({self._dispatcher.last_loss}); look at the worker's log, or add one with "
            "teacher/join_server.sh"
        )

    # --- workers ---

    def _on_worker(self, worker: bytes, frames: list[Frame]) -> None:
        message = protocol.decode(frames)
        if isinstance(message, Answer | Failure):
            client = self._dispatcher.finish(worker, message.request_id)
            if client is not None:
                self._to_client(client, protocol.readdress(frames, client[1]))
        elif isinstance(message, Ready):
            self._register(worker, message)
        elif isinstance(message, Bye):
            self._lose_worker(worker, f"the last one left: {message.reason}")
        else:
            raise TeacherProtocolError(
                f"a worker cannot send {type(message).__name__}; is this a client on the wrong port?"
            )

    def _register(self, worker: bytes, ready: Ready) -> None:
        if worker in self._dispatcher.workers:  # whoever says Ready has forgotten all that it was given
            self._lose_worker(worker, "the last one started afresh")
        try:
            self._dispatcher.add_worker(worker, ready.info, ready.capacity_tokens)
        except TeacherError as error:
            logger.warning("refused worker %s: %s", worker.hex(), error)
            self._send(self._backend, worker, protocol.encode_error(0, error))
            return
        logger.info("worker %s joined with %s", worker.hex(), ready.info)
        self._send(self._backend, worker, protocol.encode_welcome())
        self._answer_hellos()

    def _lose_worker(self, worker: bytes, reason: str) -> None:
        logger.warning("worker %s is gone: %s", worker.hex(), reason)
        for client, error in self._dispatcher.remove_worker(worker, reason):
            self._to_client(client, protocol.encode_error(client[1], error))

    def _probe_workers(self) -> None:
        """libzmq drops the connection of a worker that died or is silent, and tells only who sends to it."""
        if (now := time.monotonic()) < self._next_probe:
            return
        self._next_probe = now + WORKER_HEARTBEAT.interval_s
        for worker in list(self._dispatcher.workers):
            if not self._send(self._backend, worker, protocol.encode_probe()):
                self._lose_worker(worker, _LOST)

    def _assign(self) -> None:
        while (pair := self._dispatcher.assign()) is not None:
            worker, job = pair
            remaining_s = max(0.001, job.deadline - time.monotonic())
            if not self._send(self._backend, worker.identity, protocol.readdress(job.frames, job.job_id, remaining_s)):
                self._lose_worker(worker.identity, _LOST)

    # --- sending ---

    def _to_client(self, client: tuple[bytes, int], frames: list[Frame]) -> None:
        self._send(self._frontend, client[0], frames)  # a client that has gone needs no answer

    def _send(self, socket: zmq.Socket, identity: bytes, frames: list[Frame]) -> bool:
        """Whether the peer is still there."""
        try:
            send(socket, [identity, *frames])
        except zmq.ZMQError as error:
            logger.info("cannot reach peer %s: %s", identity.hex(), error)
            return False
        return True

    def _close(self) -> None:
        error = TeacherUnavailable("the proxy was stopped; start the service again and repeat the request")
        waiting = self._dispatcher.close_all() + [(client, request_id) for client, request_id, _ in self._hellos]
        for client in waiting:
            self._to_client(client, protocol.encode_error(client[1], error))
        self._context.destroy(linger=_FAREWELL_MS)
