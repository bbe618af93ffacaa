"""One engine behind the proxy: takes requests, scores them together, answers each as it is done.

Requests are not cut into batches: the sequences of all of them are in the engine at once, and each engine step takes as
many tokens as fit, whoever they belong to. Only the temperature is the whole engine's: see `_fill_engine`.

A lost connection ends what the worker was given, not the worker: the proxy gives that work to others, and when the
connection is back (the network is, the proxy was restarted, this process was stopped for a while) it registers anew.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher import protocol
from teacher.engines.base import ScoringEngine
from teacher.errors import TeacherProtocolError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.messages import LIMITS, Failure, Probe, Score, Welcome
from teacher.protocol import Frame
from teacher.records import TeacherAnswer
from teacher.sockets import BACKEND_PORT, WORKER_HEARTBEAT, make_socket, receive, send
from teacher.stop_signal import Stoppable

logger = logging.getLogger(__name__)

_FAREWELL_MS = 2000


@dataclass(eq=False)
class _Job:
    """One request: its sequences' engine keys, and the answers that are there."""

    request: Score
    deadline: float
    keys: list[int]
    answers: dict[int, TeacherAnswer] = field(default_factory=dict)  # by key


class Worker:
    """Connects on construction; `run` registers and serves until it is told to stop."""

    def __init__(self, engine: ScoringEngine, server_ip: str = "127.0.0.1", backend_port: int = BACKEND_PORT) -> None:
        self.address = f"tcp://{server_ip}:{backend_port}"
        self._engine = engine
        self._keys = itertools.count()
        self._jobs: dict[int, _Job] = {}  # by request id, all that have no answer yet
        self._waiting: dict[int, _Job] = {}  # those of them that are not in the engine, in order
        self._job_of_key: dict[int, _Job] = {}
        self._context = zmq.Context()
        self._socket = make_socket(
            self._context, zmq.DEALER, max_frame_bytes=LIMITS.request_frame_bytes, heartbeat=WORKER_HEARTBEAT
        )
        self._socket.connect(self.address)

    def run(
        self, stop: Stoppable, *, register_timeout_s: float = 30.0, on_registered: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until `stop` is readable.

        Raises: TeacherError if the proxy does not answer or refuses this worker, and whatever ends the engine.
        """
        reason, farewell_ms = "stopped", 0
        try:
            if self._register(stop, register_timeout_s):
                farewell_ms = _FAREWELL_MS  # somebody is there to hear it
                on_registered()
                self._serve(stop)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            # The proxy gives what is unfinished to another worker.
            send(self._socket, protocol.encode_bye(reason))
            self._socket.disable_monitor()
            self._context.destroy(linger=farewell_ms)

    def _register(self, stop: Stoppable, timeout_s: float) -> bool:
        """False if told to stop meanwhile."""
        self._say_ready()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        if stop.fileno() in ready:
            return False
        frames = receive(self._socket)
        if frames is None:
            raise TeacherUnavailable(
                f"no proxy answered at {self.address} within {timeout_s:g} s; start it with teacher/start_server.sh, "
                "or set SERVER_IP / PROXY_BACKEND_PORT to where it runs"
            )
        message = protocol.decode(frames)
        if isinstance(message, Failure):
            raise type(message.error)(f"the proxy at {self.address} refused this worker: {message.error}")
        if not isinstance(message, Welcome):
            raise TeacherProtocolError(f"expected Welcome from {self.address}, got {type(message).__name__}")
        return True

    def _say_ready(self) -> None:
        send(
            self._socket,
            protocol.encode_ready(
                self._engine.info, self._engine.capacity_tokens, f"{socket.gethostname()}:{os.getpid()}"
            ),
        )

    def _serve(self, stop: Stoppable) -> None:
        # From here on a handshake means that a connection was lost and is back.
        reconnected = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        poller = zmq.Poller()
        for source in (self._socket, reconnected, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        while stop.fileno() not in (ready := dict(poller.poll(0 if self._jobs else None))):
            if reconnected in ready:
                recv_monitor_message(reconnected)
                self._start_afresh()
            while (frames := receive(self._socket)) is not None:
                self._receive(frames)
            self._drop_expired()
            self._fill_engine()
            if self._engine.has_work():
                for key, answer in self._engine.step():
                    self._collect(key, answer)

    def _start_afresh(self) -> None:
        """Forget all requests, also the unread ones: to the proxy this connection is a worker that it does not know."""
        logger.warning("lost the connection to %s and have it again; registering anew", self.address)
        while receive(self._socket) is not None:
            pass
        for job in list(self._jobs.values()):
            self._forget(job)
        self._say_ready()

    def _receive(self, frames: list[Frame]) -> None:
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            logger.warning("dropped a message from %s: %s", self.address, error)
            return
        if isinstance(message, Failure) and message.request_id == 0:
            raise type(message.error)(f"the proxy at {self.address} sent this worker away: {message.error}")
        if isinstance(message, Probe | Welcome):
            return
        if not isinstance(message, Score):
            logger.warning("dropped a %s message from %s", type(message).__name__, self.address)
            return
        try:
            self._accept(message)
        except TeacherRequestError as error:
            send(self._socket, protocol.encode_error(message.request_id, error))

    def _accept(self, request: Score) -> None:
        """Raises: TeacherRequestError, with nothing of the request kept."""
        for i, sequence in enumerate(request.sequences):
            try:
                self._engine.check(sequence, request.temperature)
            except TeacherRequestError as error:
                raise TeacherRequestError(f"sequence {i}: {error}") from None
        job = _Job(request, time.monotonic() + request.timeout_s, [next(self._keys) for _ in request.sequences])
        self._jobs[request.request_id] = self._waiting[request.request_id] = job

    def _fill_engine(self) -> None:
        """Start the waiting requests that the engine may score now.

        While it works, those that have its temperature, up to the first that has another: nobody is overtaken for
        ever. Once it is empty, it takes the temperature of the first, and all that have it.
        """
        if not self._waiting:
            return

        def suits(job: _Job) -> bool:
            return job.request.temperature == self._engine.temperature

        waiting = list(self._waiting.values())
        if self._engine.has_work():
            startable = list(itertools.takewhile(suits, waiting))
        else:
            if not suits(waiting[0]):
                self._engine.set_temperature(waiting[0].request.temperature)
            startable = list(filter(suits, waiting))
        for job in startable:
            self._start(job)

    def _start(self, job: _Job) -> None:
        """Hand a waiting request to the engine; if it refuses, nothing of it is left there and its client is told."""
        del self._waiting[job.request.request_id]
        try:
            for key, sequence in zip(job.keys, job.request.sequences, strict=True):
                self._job_of_key[key] = job
                self._engine.add(key, sequence)
        except Exception as error:  # the engine's own refusal, of whatever type: it concerns this request only
            logger.exception("the engine refused a sequence")
            self._forget(job)
            refusal = TeacherRequestError(f"the engine refused the request: {type(error).__name__}: {error}")
            send(self._socket, protocol.encode_error(job.request.request_id, refusal))

    def _collect(self, key: int, answer: TeacherAnswer) -> None:
        job = self._job_of_key.pop(key, None)
        if job is None:
            return
        job.answers[key] = answer
        if len(job.answers) == len(job.keys):
            del self._jobs[job.request.request_id]
            send(self._socket, protocol.encode_answer(job.request.request_id, [job.answers[key] for key in job.keys]))

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            self._forget(job)
            # The client has been told by the proxy; this tells the proxy that the worker is free again.
            late = TeacherTimeout("deadline passed in the engine")
            send(self._socket, protocol.encode_error(job.request.request_id, late))

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.request.request_id]
        self._waiting.pop(job.request.request_id, None)
        self._engine.discard([key for key in job.keys if self._job_of_key.pop(key, None) is not None])
