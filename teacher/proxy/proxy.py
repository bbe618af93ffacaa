"""The one address of a teacher service: clients in front, workers behind, requests queued between.

A single-threaded loop around two ROUTER sockets. It reads headers only; token ids and logprobs pass through untouched.
What it decides is in `dispatch`, what it says about itself in `overview`.

Told to stop, it hands back what waits (clients keep it, and send it again when a service is there), finishes what
workers have, for DRAIN_S at most, and ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from teacher.errors import TeacherError, TeacherProtocolError
from teacher.logs import Seldom
from teacher.proxy.dispatch import MAX_QUEUE_TOKENS, Dispatcher, QueueFull, Worker
from teacher.proxy.doors import Doors, peer_name
from teacher.proxy.fair_queue import ClientKey, Job
from teacher.proxy.outbox import Outbox
from teacher.proxy.overview import Overview
from teacher.records import ModelInfo, TeacherInfo
from teacher.status import ServiceStatus
from teacher.stop_signal import Stoppable
from teacher.wire import protocol
from teacher.wire.auth import ServerKeys
from teacher.wire.frames import Frame
from teacher.wire.messages import (
    PROTOCOL_VERSION,
    Answer,
    AskStatus,
    Bye,
    Cancel,
    Failure,
    Hello,
    Message,
    Pulse,
    Ready,
    Score,
)
from teacher.wire.sockets import BACKEND_PORT, FRONTEND_PORT, WORKER_HEARTBEAT, receive, send

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
STALL_TIMEOUT_S = 60.0
SILENCE_PER_STALL = 1.5  # the proxy measures silence, which includes encoding and transfer of answers, not a step alone
_TICK_S = 1.0
_BURST = 64  # messages taken from one socket before the other gets its turn
_MAX_HELLOS = 1024
_STATUS_AGE_S = 1e-5  # of one that is asked for, for each open request: that is what it costs to make
_LOST = f"the last one died or hung: its connection ended, or was silent for {WORKER_HEARTBEAT.timeout_s:g} s"


class Proxy:
    """Binds on construction. `run` serves until it is told to stop. `latest_status` is of at most a second ago."""

    def __init__(
        self,
        bind: str = "127.0.0.1",
        frontend_port: int = FRONTEND_PORT,
        backend_port: int = BACKEND_PORT,
        *,
        keys: ServerKeys | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        max_queue_tokens: int = MAX_QUEUE_TOKENS,
    ) -> None:
        """Port 0 takes a free one; `frontend_port` and `backend_port` then say which.

        Args:
            keys: who is let in; without, only a loopback address can be bound.
            stall_timeout_s: Least limit of an engine step, in seconds. A worker that is silent for
                ``SILENCE_PER_STALL`` times as long, or times its own limit if that is larger, hangs, and its requests
                go to others.
            max_queue_tokens: of the requests that wait; beyond, clients are told to keep theirs.

        Raises: TeacherError if an address cannot be bound.
        """
        self._doors = Doors(bind, frontend_port, backend_port, keys)
        self._frontend, self._backend = self._doors.frontend, self._doors.backend
        self.frontend_port, self.backend_port = self._doors.frontend_port, self._doors.backend_port
        self._dispatcher = Dispatcher(max_queue_tokens)
        self._overview = Overview(self._dispatcher)
        self._stall_timeout_s = stall_timeout_s
        self._invalid = Seldom()
        self._hellos: dict[ClientKey, float] = {}  # deadlines of those that wait for a worker
        self._told_to_rejoin: dict[bytes, float] = {}
        self._next_tick = 0.0  # time.monotonic(), as all times here
        self._drain_until: float | None = None
        self._outbox = Outbox(self._frontend)
        self.latest_status: ServiceStatus
        self.latest_status_at: float
        self._take_stock(time.monotonic())

    def run(self, stop: Stoppable) -> None:
        poller = zmq.Poller()
        for source in (self._frontend, self._backend, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_drained():
                ready = dict(poller.poll(self._wait_ms()))
                if stop.fileno() in ready:
                    poller.unregister(stop.fileno())
                    self._begin_to_drain()
                # Answers first: they free the workers that new requests need.
                if self._backend in ready:
                    self._read(self._backend, self._on_worker, self._on_bad_worker)
                if self._frontend in ready:
                    self._read(self._frontend, self._on_client, self._on_bad_client)
                self._expire()
                self._tick()
                for client in self._outbox.flush():
                    self._lose_client(client, "it does not read what it asked for")
                self._assign()
        finally:
            self._close()

    def _wait_ms(self) -> int:
        deadlines = [self._next_tick, *self._hellos.values()]
        if (next_job := self._dispatcher.next_deadline()) is not None:
            deadlines.append(next_job)
        if (next_try := self._outbox.next_try()) is not None:
            deadlines.append(next_try)
        if self._drain_until is not None:
            deadlines.append(self._drain_until)
        return int(1000 * max(0.0, min(deadlines) - time.monotonic())) + 1

    def _read(
        self,
        socket: zmq.Socket,
        handle: Callable[[bytes, Message, list[Frame]], None],
        refuse: Callable[[bytes, int, TeacherProtocolError], None],
    ) -> None:
        for _ in range(_BURST):
            if (frames := receive(socket)) is None:
                return
            identity, *body = frames
            try:
                handle(identity.bytes, protocol.decode(body), body)
            except TeacherProtocolError as error:
                self._overview.count(invalid_messages=1)
                if times := self._invalid.count(peer_name(frames)):
                    logger.warning("dropped %d messages from %s, the last: %s", times, peer_name(frames), error)
                if (request_id := protocol.peek_request_id(body)) is not None:
                    refuse(identity.bytes, request_id, error)

    # --- clients ---

    def _on_client(self, client: bytes, message: Message, frames: list[Frame]) -> None:
        now = time.monotonic()
        self._overview.heard_client(client, peer_name(frames), now)
        match message:
            case Score():
                self._on_score((client, message.request_id), message, frames, now)
            case Cancel():
                self._cancel((client, message.request_id))
            case Hello():
                if len(self._hellos) < _MAX_HELLOS:
                    self._hellos[client, message.request_id] = now + message.timeout_s
                    self._answer_hellos()
                else:
                    self._put_off((client, message.request_id), f"{_MAX_HELLOS} clients wait for a worker already")
            case AskStatus():
                if now - self.latest_status_at > _STATUS_AGE_S * len(self._dispatcher.open_jobs):
                    self._take_stock(now)
                self._to_client(client, protocol.encode_status(message.request_id, self.latest_status))
            case _:
                raise TeacherProtocolError(
                    f"a client cannot send {type(message).__name__}; is this a worker on the wrong port?"
                )

    def _on_bad_client(self, client: bytes, request_id: int, error: TeacherProtocolError) -> None:
        self._send(self._frontend, client, protocol.encode_error(request_id, error))

    def _on_score(self, key: ClientKey, message: Score, frames: list[Frame], now: float) -> None:
        if self._drain_until is not None:
            self._put_off(key, "the proxy is going down")
            return
        try:
            self._dispatcher.add_job(key, frames, message.n_tokens, now + message.timeout_s, now)
        except QueueFull as full:
            self._overview.count(put_off=1)
            self._put_off(key, str(full))

    def _cancel(self, key: ClientKey) -> None:
        self._hellos.pop(key, None)
        if (cancelled := self._dispatcher.cancel(key)) is not None:
            job, worker = cancelled
            self._overview.count(cancelled=1)
            if worker is not None:
                self._tell_canceled(worker, job)

    def _tell_canceled(self, worker: Worker, job: Job) -> None:
        self._send(self._backend, worker.identity, protocol.encode_cancel(job.job_id))

    def _answer_hellos(self) -> None:
        if (model := self._dispatcher.info) is None:
            return
        n_workers = len(self._dispatcher.workers)
        info = TeacherInfo(**vars(model), protocol_version=PROTOCOL_VERSION, n_workers=n_workers)
        for client, request_id in list(self._hellos):
            self._to_client(client, protocol.encode_info(request_id, info))
        self._hellos.clear()

    def _put_off(self, key: ClientKey, reason: str) -> None:
        self._to_client(key[0], protocol.encode_later(key[1], reason))

    def _expire(self) -> None:
        now = time.monotonic()
        for job, worker in self._dispatcher.expire(now):
            self._overview.count(expired=1)
            if worker is not None:
                self._tell_canceled(worker, job)
            error = self._dispatcher.deadline_error(worker)
            self._to_client(job.client[0], protocol.encode_error(job.client[1], error))
        for key in [key for key, deadline in self._hellos.items() if deadline <= now]:
            if self._hellos.pop(key, None) is not None:  # else it went with its client
                self._to_client(key[0], protocol.encode_error(key[1], self._dispatcher.no_worker()))

    def _lose_client(self, client: bytes, reason: str) -> None:
        self._outbox.forget(client)
        keys = [job.client for job in self._dispatcher.open_jobs if job.client[0] == client]
        if keys:
            logger.warning(
                "client %s is gone with %d requests open: %s", self._overview.name_of(client), len(keys), reason
            )
        for key in keys:
            self._cancel(key)

    # --- workers ---

    def _on_worker(self, identity: bytes, message: Message, frames: list[Frame]) -> None:
        now = time.monotonic()
        if isinstance(message, Ready):
            self._register(identity, message, now)
        elif isinstance(message, Bye):
            self._lose_worker(identity, f"the last one left: {message.reason}", left=not message.broken)
        elif not isinstance(message, Answer | Failure | Pulse):
            raise TeacherProtocolError(
                f"a worker cannot send {type(message).__name__}; is this a client on the wrong port?"
            )
        elif identity not in self._dispatcher.workers:
            self._tell_to_rejoin(identity, now)
        elif isinstance(message, Pulse):
            self._overview.heard_worker(identity, now, message)
        else:
            self._overview.heard_worker(identity, now)
            if (job := self._dispatcher.finish(identity, message.request_id)) is not None:
                self._overview.finished(job, message, frames, now)
                if isinstance(message, Failure):
                    frames = protocol.encode_error(job.client[1], message.error)
                else:
                    frames = protocol.readdress(frames, job.client[1])
                self._to_client(job.client[0], frames)

    def _on_bad_worker(self, identity: bytes, request_id: int, error: TeacherProtocolError) -> None:
        """What came instead of an answer ends the request: another worker of this kind would say the same."""
        if (job := self._dispatcher.finish(identity, request_id)) is not None:
            self._to_client(job.client[0], protocol.encode_error(job.client[1], error))
        else:
            self._send(self._backend, identity, protocol.encode_error(request_id, error))

    def _register(self, identity: bytes, ready: Ready, now: float) -> None:
        if identity in self._dispatcher.workers:  # whoever says Ready has forgotten all that it was given
            self._lose_worker(identity, "the last one started afresh", left=True)
        self._told_to_rejoin.pop(identity, None)
        try:
            worker = Worker(identity, ready.name, ready.info, ready.capacity_tokens, ready.stall_timeout_s)
            self._dispatcher.add_worker(worker)
        except TeacherError as error:
            logger.warning("refused worker %s: %s", ready.name, error)
            self._send(self._backend, identity, protocol.encode_error(0, error))
            return
        self._overview.joined(identity, now)
        logger.info(
            "worker %s joined with %s", ready.name, _brief(ready.info), extra={"fields": {"worker": ready.name}}
        )
        self._send(self._backend, identity, protocol.encode_welcome())
        self._answer_hellos()

    def _tell_to_rejoin(self, identity: bytes, now: float) -> None:
        """It was taken for lost, and is not: once, until it has had time to hear it."""
        if self._told_to_rejoin.get(identity, 0.0) <= now:
            self._told_to_rejoin[identity] = now + WORKER_HEARTBEAT.timeout_s
            self._send(self._backend, identity, protocol.encode_rejoin())

    def _lose_worker(self, identity: bytes, reason: str, *, left: bool = False) -> None:
        worker = self._dispatcher.workers.get(identity)
        if worker is None:
            return
        repeated, given_up = self._dispatcher.remove_worker(identity, reason, left=left)
        logger.log(
            logging.INFO if left else logging.WARNING,
            "worker %s is gone, %d of its requests wait again: %s",
            worker.name,
            len(repeated),
            reason,
            extra={
                "fields": {"worker": worker.name, "repeated": len(repeated), "workers": len(self._dispatcher.workers)}
            },
        )
        self._overview.lost(identity, left=left, repeated=len(repeated), given_up=len(given_up))
        for job, error in given_up:
            self._to_client(job.client[0], protocol.encode_error(job.client[1], error))
        if self._drain_until is not None:
            self._hand_back()

    def _assign(self) -> None:
        while (pair := self._dispatcher.assign(self._outbox.unread)) is not None:
            worker, job = pair
            job.given = time.monotonic()
            remaining_s = max(0.001, job.deadline - job.given)
            if not self._send(self._backend, worker.identity, protocol.readdress(job.frames, job.job_id, remaining_s)):
                self._lose_worker(worker.identity, _LOST)

    # --- once a second ---

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        self._look_after_workers(now)
        # libzmq drops the connection of a peer that died or is silent, and tells only who sends to it.
        for client in {job.client[0] for job in self._dispatcher.open_jobs}:
            if client not in self._outbox.unread and not self._send(self._frontend, client, protocol.encode_probe()):
                self._lose_client(client, "its connection ended")
        self._told_to_rejoin = {who: until for who, until in self._told_to_rejoin.items() if until > now}
        self._take_stock(now)

    def _look_after_workers(self, now: float) -> None:
        for identity, worker in list(self._dispatcher.workers.items()):
            max_silence_s = SILENCE_PER_STALL * max(self._stall_timeout_s, worker.stall_timeout_s)
            if not self._send(self._backend, identity, protocol.encode_probe()):
                self._lose_worker(identity, _LOST)
            elif (silent_s := self._overview.silent_s(identity, now)) > max_silence_s:
                self._lose_worker(identity, f"the last one hangs: its engine has made no step for {silent_s:.0f} s")

    def _take_stock(self, now: float) -> None:
        self.latest_status = self._overview.status(now, draining=self._drain_until is not None)
        self.latest_status_at = now

    # --- sending ---

    def _to_client(self, client: bytes, frames: list[Frame]) -> None:
        if not self._outbox.send(client, frames):
            self._lose_client(client, "its connection ended")

    def _send(self, socket: zmq.Socket, identity: bytes, frames: list[Frame]) -> bool:
        """Whether the peer is still there; a message to one that does not read is dropped."""
        try:
            send(socket, [identity, *frames])
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            logger.debug("cannot reach peer %s: %s", identity.hex(), error)
            return False
        return True

    # --- the end ---

    def _begin_to_drain(self) -> None:
        self._drain_until = time.monotonic() + DRAIN_S
        in_flight = sum(len(worker.in_flight) for worker in self._dispatcher.workers.values())
        logger.info("told to stop: %d requests are finished, %d handed back", in_flight, self._dispatcher.queue.n_jobs)
        self._hand_back()

    def _hand_back(self) -> None:
        for key in [*(job.client for job in self._dispatcher.drop_waiting()), *self._hellos]:
            self._put_off(key, "the proxy is going down")
        self._hellos.clear()

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        is_done = not self._dispatcher.open_jobs and not self._outbox.unread
        return is_done or time.monotonic() >= self._drain_until

    def _close(self) -> None:
        for job in self._dispatcher.open_jobs:
            self._outbox.send(job.client[0], protocol.encode_later(job.client[1], "the proxy has gone down"))
        self._doors.close()


def _brief(info: ModelInfo) -> str:
    return f"{info.model_name} ({info.engine}), top {info.n_logprobs} of {info.n_tokens}, {info.max_model_len} tokens"
