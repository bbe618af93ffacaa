"""Worker of a teacher service: one engine that scores the requests of a proxy. ``worker_jobs`` has their states.

==============  ======================================  ==============  =============================================
state           event                                   next state      action
==============  ======================================  ==============  =============================================
disconnected    connection established                  registering     requests are dropped; Ready is sent
registering     Welcome                                 registered      ``on_registered`` on the first registration
registering     Failure with request id 0               (ended)         the error is raised
registered      Reregister                              registering     requests are dropped; Ready is sent
any             connection lost                         disconnected    requests are dropped
any             ``stop`` is readable                    (ended)         Goodbye is sent
any             engine failed                           (ended)         Goodbye is sent; the error is raised
==============  ======================================  ==============  =============================================

In each of these states the engine is awake or asleep. SetAsleep changes that after the open requests are finished. The
reply is sent when the engine has released its memory, or has restored and verified its model. A model that is not the
same as before is an engine failure. While the engine sleeps, heartbeats continue and requests are refused. The state
outlives a lost connection: Ready contains it.

Dropped requests are not lost: the proxy assigns them to other workers. An engine call that hangs ends the process
(``stall_watchdog``), so that a supervisor can start another one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from teacher.common.memory_trim import MemoryTrimmer
from teacher.engines.base import ScoringEngine, SleepingEngine
from teacher.errors import TeacherAsleep, TeacherProtocolError, TeacherRequestError
from teacher.stall_watchdog import stall_watchdog
from teacher.stop_signal import Stoppable
from teacher.wire import protocol
from teacher.wire.connection import WORKER, Connection
from teacher.wire.frames import Frame
from teacher.wire.messages import (
    AsleepSet,
    Cancel,
    Failure,
    Goodbye,
    Heartbeat,
    Probe,
    Ready,
    Reregister,
    Score,
    SetAsleep,
    Welcome,
)
from teacher.wire.sockets import BACKEND_PORT, WORKER_HEARTBEAT
from teacher.worker_jobs import WorkerJobs

logger = logging.getLogger(__name__)

_GOODBYE_LINGER_MS = 2000


class Worker:
    """Worker process.

    Lifecycle::

        worker = Worker(engine, server_ip, backend_port)   # connects in the background
        worker.run(StopSignal())                           # registers, and serves until the signal

    Attributes:
        address: Address of the proxy.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        server_ip: str = "127.0.0.1",
        backend_port: int = BACKEND_PORT,
        *,
        auth_dir: str | Path | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Start to connect.

        Args:
            engine: Loaded engine.
            server_ip: Host name or IP of the proxy.
            backend_port: Port of the proxy for workers.
            auth_dir: Folder of this worker's keys, None for a service without keys.
            stall_timeout_s: Time limit of an engine call in seconds, after which the process is ended; None for no
                limit. The proxy receives this limit and waits longer.

        Raises:
            TeacherSetupError: The address is malformed, or keys are missing.
        """
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._connection = Connection(WORKER, server_ip, backend_port, auth_dir)
        self._heartbeats = _HeartbeatSender(lambda frames: self._connection.send(frames))
        self._jobs = WorkerJobs(engine, lambda frames: self._connection.send(frames))
        self.address = self._connection.address
        self._is_registered = False
        self._sleeper = engine if isinstance(engine, SleepingEngine) and engine.has_sleep_mode else None
        self._is_asleep = False
        self._state_request: SetAsleep | None = None

    def run(
        self, stop: Stoppable, *, register_timeout_s: float = 30.0, on_registered: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until ``stop`` is readable, then close the connection.

        Args:
            stop: Stop signal.
            register_timeout_s: Time limit of the first registration, in seconds.
            on_registered: Function that is called after the first registration.

        Raises:
            TeacherError: The proxy does not reply, or refuses this worker.
            Exception: The engine failed.
        """
        reason, broken = "stopped", False
        register_until = time.monotonic() + register_timeout_s
        try:
            self._serve(stop, register_until, on_registered)
        except Exception as error:
            reason, broken = f"{type(error).__name__}: {error}", True
            raise
        finally:
            self._connection.send(protocol.encode(Goodbye(reason, broken=broken)))
            self._connection.close(_GOODBYE_LINGER_MS if self._connection.is_up else 0)

    def _serve(self, stop: Stoppable, register_until: float, on_registered: Callable[[], None]) -> None:
        poller = zmq.Poller()
        for source in (self._connection.socket, self._connection.monitor, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        was_registered, trimmer = False, MemoryTrimmer()
        while stop.fileno() not in (ready := dict(poller.poll(0 if self._jobs else self._heartbeats.wait_ms()))):
            if self._connection.monitor in ready:
                self._on_connection_event(was_registered)
            while (frames := self._connection.receive()) is not None:
                self._receive(frames)
            self._connection.reconnect_if_due(time.monotonic())
            with stall_watchdog(self._stall_timeout_s):
                self._jobs.fill_engine()
            if self._engine.has_work():
                self._step()
            if self._state_request is not None and not self._jobs:
                self._change_state(self._state_request)
            self._heartbeats.send_if_due(is_registered=self._is_registered)
            trimmer.trim_if_due()
            if self._is_registered and not was_registered:
                was_registered = True
                on_registered()
            if not was_registered and time.monotonic() > register_until:
                raise self._connection.outage().replaced(operation="registration")

    def _on_connection_event(self, was_registered: bool) -> None:
        if refusal := self._connection.read_event():
            logger.warning("%s", refusal)
        if self._connection.is_up:
            if was_registered:
                logger.warning("reconnected to %s after the connection was lost", self.address)
            self._register()
        else:  # no message may be queued now: it would arrive before Ready
            self._drop_requests()

    def _register(self) -> None:
        """Send Ready. The proxy treats this connection as a new worker, so unread requests are dropped too."""
        while self._connection.receive() is not None:
            pass
        self._drop_requests()
        ready = Ready(
            self._engine.info,
            self._engine.capacity_tokens,
            f"{socket.gethostname()}:{os.getpid()}",
            self._stall_timeout_s or 0.0,
            has_sleep_mode=self._sleeper is not None,
            is_asleep=self._is_asleep,
        )
        self._connection.send(protocol.encode(ready))

    def _drop_requests(self) -> None:
        self._is_registered = False
        self._state_request = None
        self._jobs.clear()

    def _receive(self, frames: list[Frame]) -> None:
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            logger.warning("dropped a message from %s: %s", self.address, error)
            if request_id := protocol.peek_request_id(frames):
                self._connection.send(protocol.encode(Failure(request_id, error)))
            return
        if isinstance(message, Failure) and message.request_id == 0:
            raise message.error.replaced(operation="registration", address=self.address)
        match message:
            case Score() if self._is_asleep:  # the proxy does not send any
                refusal = TeacherAsleep("this worker sleeps", remedy="wake it with `python -m teacher wake`")
                self._connection.send(protocol.encode(Failure(message.request_id, refusal)))
            case Score():
                self._jobs.add(message)
            case SetAsleep():
                self._state_request = message
            case Cancel():
                self._jobs.cancel(message.request_id)
            case Reregister():
                logger.warning("the proxy at %s removed this worker; registering again", self.address)
                self._register()
            case Welcome():
                self._is_registered = True
            case Probe():
                pass
            case _:
                logger.warning("dropped a %s message from %s", type(message).__name__, self.address)

    def _change_state(self, request: SetAsleep) -> None:
        """Let the engine sleep or wake up, and reply. The time limit includes the transfer of all weights."""
        self._state_request = None
        if self._sleeper is None:
            error = TeacherRequestError(
                "this worker has no sleep mode",
                options=("--sleep-mode",),
                remedy="start it with SLEEP_MODE=1 (--sleep-mode)",
            )
            self._connection.send(protocol.encode(Failure(request.request_id, error)))
            return
        if request.asleep != self._is_asleep:
            limit_s = self._stall_timeout_s and max(self._stall_timeout_s, request.timeout_s)
            with stall_watchdog(limit_s):
                self._sleeper.sleep() if request.asleep else self._sleeper.wake()
            self._is_asleep = request.asleep
        self._connection.send(protocol.encode(AsleepSet(request.request_id, asleep=request.asleep, n_workers=1)))

    def _step(self) -> None:
        started_at = time.monotonic()
        with stall_watchdog(self._stall_timeout_s):
            finished = self._engine.step()
        busy_s = time.monotonic() - started_at
        n_tokens = 0
        for key, result in finished:
            self._heartbeats.send_if_due(
                is_registered=self._is_registered
            )  # encoding large replies takes time, and the proxy measures the silence
            if isinstance(result, TeacherRequestError):
                self._jobs.refuse(key, result)
            else:
                n_tokens += self._jobs.collect(key, result)
        self._heartbeats.add_step(len(finished), n_tokens, busy_s)


class _HeartbeatSender:
    """Heartbeats with the worker's progress."""

    def __init__(self, send: Callable[[list[Frame]], None]) -> None:
        self._send = send
        self._progress = Heartbeat(0, 0, 0, 0.0)
        self._next_at = 0.0  # time.monotonic()

    def wait_ms(self) -> int:
        """Return the time until the next heartbeat, in milliseconds."""
        return int(1000 * max(0.0, self._next_at - time.monotonic())) + 1

    def add_step(self, n_sequences: int, n_tokens: int, busy_s: float) -> None:
        """Add an engine step to the progress."""
        before = self._progress
        self._progress = Heartbeat(
            before.n_steps + 1, before.n_sequences + n_sequences, before.n_tokens + n_tokens, before.busy_s + busy_s
        )

    def send_if_due(self, *, is_registered: bool) -> None:
        """Send a heartbeat if the interval has passed. An unregistered worker skips it."""
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + WORKER_HEARTBEAT.interval_s
            if is_registered:
                self._send(protocol.encode(self._progress))
