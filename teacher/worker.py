"""One engine behind the proxy: takes requests, scores them together, answers each as it is done.

Requests are not cut into batches: the sequences of all of them are in the engine at once, and each engine step takes as
many tokens as fit, whoever they belong to. Only the temperature is the whole engine's: see `_fill_engine`.

A lost connection ends what the worker was given, not the worker: the proxy gives that work to others, and when the
connection is back (the network is, the proxy was restarted, this process was stopped for a while) it registers anew.
So it does when the proxy took it for lost and says so. An engine that hangs ends the process, with the stacks of its
threads in the log: who watches over it can start another.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from teacher.engines.base import ScoringEngine
from teacher.errors import TeacherChanged, TeacherProtocolError, TeacherRequestError, TeacherUnavailable
from teacher.records import ScoredSequence
from teacher.stop_signal import Stoppable
from teacher.wire import protocol
from teacher.wire.connection import WORKER, Connection
from teacher.wire.frames import Frame
from teacher.wire.messages import Cancel, Failure, Probe, Pulse, Ready, Rejoin, Score, Welcome
from teacher.wire.sockets import BACKEND_PORT, WORKER_HEARTBEAT

logger = logging.getLogger(__name__)

_FAREWELL_MS = 2000


@dataclass(eq=False)
class _Job:
    """One request: its sequences' engine keys, and the answers that are there."""

    request: Score
    keys: list[int]
    answers: dict[int, ScoredSequence] = field(default_factory=dict)  # by key


class Worker:
    """Connects on construction; `run` registers and serves until it is told to stop."""

    def __init__(
        self,
        engine: ScoringEngine,
        server_ip: str = "127.0.0.1",
        backend_port: int = BACKEND_PORT,
        *,
        auth_dir: str | Path | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Args:
            auth_dir: folder with this worker's keys, for a proxy that has some.
            stall_timeout_s: an engine step that takes longer ends the process; None: nobody watches. The proxy
                receives this limit and waits longer.

        Raises: TeacherError if the address is malformed or keys are missing.
        """
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._done = Pulse(0, 0, 0, 0.0)
        self._next_pulse = 0.0  # time.monotonic()
        self._keys = itertools.count()
        self._jobs: dict[int, _Job] = {}  # by request id, all that have no answer yet
        self._waiting: dict[int, _Job] = {}  # those of them that are not in the engine, in order
        self._job_of_key: dict[int, _Job] = {}
        self._connection = Connection(WORKER, server_ip, backend_port, auth_dir)
        self.address = self._connection.address
        self._is_registered = False

    def run(
        self, stop: Stoppable, *, register_timeout_s: float = 30.0, on_registered: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until `stop` is readable.

        Raises: TeacherError if the proxy does not answer or refuses this worker, and whatever ends the engine.
        """
        reason, broken = "stopped", False
        register_until = time.monotonic() + register_timeout_s
        try:
            self._serve(stop, register_until, on_registered)
        except Exception as error:
            reason, broken = f"{type(error).__name__}: {error}", True
            raise
        finally:
            # The proxy gives what is unfinished to another worker.
            self._connection.send(protocol.encode_bye(reason, broken=broken))
            self._connection.close(_FAREWELL_MS if self._connection.is_up else 0)

    def _serve(self, stop: Stoppable, register_until: float, on_registered: Callable[[], None]) -> None:
        poller = zmq.Poller()
        for source in (self._connection.socket, self._connection.monitor, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        was_registered = False
        while stop.fileno() not in (ready := dict(poller.poll(0 if self._jobs else self._until_pulse_ms()))):
            if self._connection.monitor in ready:
                self._on_event(was_registered)
            while (frames := self._connection.receive()) is not None:
                self._receive(frames)
            self._connection.reconnect_if_due(time.monotonic())
            with self._watched():
                self._fill_engine()
            if self._engine.has_work():
                self._step()
            self._pulse()
            if self._is_registered and not was_registered:
                was_registered = True
                on_registered()
            if not was_registered and time.monotonic() > register_until:
                raise TeacherUnavailable(f"no proxy answered at {self.address}: {self._connection.why_down()}")

    def _on_event(self, was_registered: bool) -> None:
        if refusal := self._connection.read_event():
            logger.warning("%s", refusal)
        if self._connection.is_up:
            if was_registered:
                logger.warning("lost the connection to %s and have it again", self.address)
            self._start_afresh()
        else:  # what would be said now would wait, and come before READY
            self._forget_all()

    def _step(self) -> None:
        began = time.monotonic()
        with self._watched():
            finished = self._engine.step()
        done, busy_s = self._done, time.monotonic() - began
        n_tokens = 0
        for key, result in finished:
            self._pulse()  # large answers take their time to encode, and the proxy counts silence
            if isinstance(result, TeacherRequestError):
                self._refuse(key, result)
            else:
                n_tokens += self._collect(key, result)
        self._done = Pulse(
            done.n_steps + 1, done.n_sequences + len(finished), done.n_tokens + n_tokens, done.busy_s + busy_s
        )

    def _pulse(self) -> None:
        if (now := time.monotonic()) >= self._next_pulse:
            self._next_pulse = now + WORKER_HEARTBEAT.interval_s
            if self._is_registered:
                self._connection.send(protocol.encode_pulse(self._done))

    def _until_pulse_ms(self) -> int:
        return int(1000 * max(0.0, self._next_pulse - time.monotonic())) + 1

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The engine at work. The watch is a thread of C: it needs neither the GIL nor an engine that returns."""
        if self._stall_timeout_s is None:
            yield
            return
        faulthandler.dump_traceback_later(self._stall_timeout_s, exit=True, file=sys.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _start_afresh(self) -> None:
        """Forget all requests, also the unread ones: to the proxy this connection is a worker that it does not know."""
        while self._connection.receive() is not None:
            pass
        self._forget_all()
        name = f"{socket.gethostname()}:{os.getpid()}"
        ready = Ready(self._engine.info, self._engine.capacity_tokens, name, self._stall_timeout_s or 0.0)
        self._connection.send(protocol.encode_ready(ready))

    def _forget_all(self) -> None:
        self._is_registered = False
        for job in list(self._jobs.values()):
            self._forget(job)

    def _receive(self, frames: list[Frame]) -> None:
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            logger.warning("dropped a message from %s: %s", self.address, error)
            if request_id := protocol.peek_request_id(frames):
                self._connection.send(protocol.encode_error(request_id, error))
            return
        if isinstance(message, Failure) and message.request_id == 0:
            raise type(message.error)(f"the proxy at {self.address} refused this worker: {message.error}")
        match message:
            case Score() if message.request_id in self._jobs:
                pass  # put back, and dealt to this worker again: it is at it
            case Score():
                try:
                    self._accept(message)
                except (TeacherRequestError, TeacherChanged) as error:
                    self._connection.send(protocol.encode_error(message.request_id, error))
            case Cancel():
                if (job := self._jobs.get(message.request_id)) is not None:
                    self._forget(job)
            case Rejoin():
                logger.warning("the proxy had taken this worker for lost; registering anew with %s", self.address)
                self._start_afresh()
            case Welcome():
                self._is_registered = True
            case Probe():
                pass
            case _:
                logger.warning("dropped a %s message from %s", type(message).__name__, self.address)

    def _accept(self, request: Score) -> None:
        """Raises: TeacherRequestError or TeacherChanged, with nothing of the request kept."""
        if request.model not in ("", self._engine.info.identity):
            raise TeacherChanged(
                f"this service serves {self._engine.info.identity}, but the request is for the model that its client "
                f"met before: {request.model}; start the service with that again, or begin a new run with this one"
            )
        if request.top_k > self._engine.info.n_logprobs:
            raise TeacherRequestError(
                f"top_k={request.top_k}, the teacher returns at most {self._engine.info.n_logprobs}; lower "
                "actor_rollout_ref.teacher.top_k, or start the teacher with a larger N_LOGPROBS"
            )
        for i, sequence in enumerate(request.sequences):
            try:
                self._engine.check(sequence, request.temperature)
            except TeacherRequestError as error:
                raise TeacherRequestError(f"sequence {i}: {error}") from None
        job = _Job(request, [next(self._keys) for _ in request.sequences])
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
            self._refuse(key, TeacherRequestError(f"the engine refused the request: {type(error).__name__}: {error}"))

    def _refuse(self, key: int, error: TeacherRequestError) -> None:
        """End the request that this sequence belongs to with an error, if it is still open."""
        if (job := self._job_of_key.get(key)) is not None:
            self._forget(job)
            self._connection.send(protocol.encode_error(job.request.request_id, error))

    def _collect(self, key: int, answer: ScoredSequence) -> int:
        """Answer the request if this was its last sequence. Returns the sequence's tokens; 0 if nobody waits for it."""
        job = self._job_of_key.pop(key, None)
        if job is None:
            return 0
        request = job.request
        job.answers[key] = answer
        if len(job.answers) == len(job.keys):
            del self._jobs[request.request_id]
            answers = [job.answers[key] for key in job.keys]
            frames = protocol.encode_answer(
                request.request_id, answers, top_k=request.top_k, wire_dtype=request.wire_dtype
            )
            self._connection.send(frames)
        return len(request.sequences[key - job.keys[0]].token_ids)

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.request.request_id]
        self._waiting.pop(job.request.request_id, None)
        self._engine.discard([key for key in job.keys if self._job_of_key.pop(key, None) is not None])
