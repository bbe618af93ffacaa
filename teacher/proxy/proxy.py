"""Proxy of a teacher service: one address for clients and workers, with a queue of requests between them.

A single-threaded loop around two ROUTER sockets. It decodes headers only; token ids and log-probabilities pass through
unchanged. Each policy has its own module:

==================  ================================================================================================
``dispatch``        which worker gets which request; states of a request
``client_side``     client messages, replies, deadlines, lost clients
``worker_side``     worker messages, registration, results, lost workers; states of a worker
``liveness``        periodic detection of lost workers and clients
``drain``           orderly stop; states of the proxy
``sleep_control``   sleep and wake-up; states of the service
``status_tracker``  totals and status
==================  ================================================================================================
"""

from __future__ import annotations

import logging
import time

import zmq

from teacher.errors import TeacherProtocolError
from teacher.logs import LogRateLimiter
from teacher.proxy.admission import MAX_QUEUE_TOKENS, QueueLimits
from teacher.proxy.client_side import ClientSide
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.drain import Drain
from teacher.proxy.liveness import STALL_TIMEOUT_S, LivenessMonitor
from teacher.proxy.proxy_sockets import ProxySockets, SocketSettings, peer_name
from teacher.proxy.sleep_control import SleepControl
from teacher.proxy.status_tracker import StatusTracker
from teacher.proxy.worker_side import WorkerSide
from teacher.status import ServiceStatus
from teacher.stop_signal import Stoppable
from teacher.wire import protocol
from teacher.wire.sockets import BACKEND_PORT, FRONTEND_PORT, receive

__all__ = ["STALL_TIMEOUT_S", "Proxy"]

logger = logging.getLogger(__name__)

_BURST_MESSAGES = 64
"""Messages that are read from one socket before the other one is read."""


class Proxy:
    """Proxy process of a service.

    Lifecycle::

        proxy = Proxy("127.0.0.1", 0, 0)   # binds both ports
        proxy.frontend_port                # the port for clients
        proxy.run(StopSignal())            # serves until the signal, then drains and closes

    Attributes:
        frontend_port: Port for clients.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1",
        frontend_port: int = FRONTEND_PORT,
        backend_port: int = BACKEND_PORT,
        *,
        sockets: SocketSettings | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        max_queue_tokens: int = MAX_QUEUE_TOKENS,
    ) -> None:
        """Bind the sockets.

        Args:
            bind: IPv4 address or interface.
            frontend_port: Port for clients, 0 for a free one.
            backend_port: Port for workers, 0 for a free one.
            sockets: Security and threads of the sockets; None for the defaults, which allow only loopback addresses.
            stall_timeout_s: Minimum time limit of an engine step, in seconds. A worker that is silent for
                ``SILENCE_PER_STALL_TIMEOUT`` times this limit, or times its own limit if that is larger, is removed.
            max_queue_tokens: Tokens of waiting requests above which clients receive RetryLater.

        Raises:
            TeacherError: An address cannot be bound.
        """
        self._sockets = ProxySockets(bind, frontend_port, backend_port, sockets or SocketSettings())
        self.frontend_port, self.backend_port = self._sockets.frontend_port, self._sockets.backend_port
        self._dispatcher = Dispatcher(QueueLimits(max_tokens=max_queue_tokens))
        self._sleep = SleepControl(self._dispatcher)
        self._tracker = StatusTracker(self._dispatcher, self._sleep)
        self._drain = Drain()
        parts = (self._sockets, self._dispatcher, self._tracker, self._drain, self._sleep)
        self._clients = ClientSide(*parts)
        self._workers = WorkerSide(*parts, self._clients)
        self._liveness = LivenessMonitor(
            self._sockets,
            self._dispatcher,
            self._tracker,
            self._clients,
            self._workers,
            stall_timeout_s=stall_timeout_s,
        )
        self._invalid_log = LogRateLimiter()

    @property
    def latest_status(self) -> ServiceStatus:
        """Status, at most about one second old. May be read by other threads."""
        return self._tracker.latest

    @property
    def latest_status_at(self) -> float:
        """Time of ``latest_status`` by ``time.monotonic()``."""
        return self._tracker.latest_at

    def run(self, stop: Stoppable) -> None:
        """Serve until ``stop`` is readable, then drain and close the sockets."""
        poller = zmq.Poller()
        for source in (self._sockets.frontend, self._sockets.backend, stop.fileno()):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_drained():
                ready = dict(poller.poll(self._poll_timeout_ms()))
                if stop.fileno() in ready:
                    poller.unregister(stop.fileno())
                    self._begin_drain()
                self._process(ready)
        finally:
            self._clients.return_all()
            self._sockets.close()

    def _process(self, ready: dict[object, int]) -> None:
        if self._sockets.backend in ready:  # results first: they free the workers for new requests
            self._read(self._sockets.backend, self._workers)
        if self._sockets.frontend in ready:
            self._read(self._sockets.frontend, self._clients)
        self._clients.expire(time.monotonic())
        if self._liveness.check_if_due(now := time.monotonic()):
            self._tracker.refresh(now, draining=self._drain.is_active)
        self._clients.flush()
        self._workers.send_state_commands(now := time.monotonic())
        self._clients.answer_sleep_requests(now)
        self._workers.assign()

    def _poll_timeout_ms(self) -> int:
        times = [self._liveness.next_check_at, self._clients.next_deadline(), self._drain.deadline]
        wake_at = min(at for at in times if at is not None)
        return int(1000 * max(0.0, wake_at - time.monotonic())) + 1

    def _read(self, socket: zmq.Socket, side: ClientSide | WorkerSide) -> None:
        for _ in range(_BURST_MESSAGES):
            if (frames := receive(socket)) is None:
                return
            identity, *body = frames
            peer = peer_name(frames)
            try:
                side.on_message(identity.bytes, peer, protocol.decode(body), body, time.monotonic())
            except TeacherProtocolError as error:
                self._tracker.count(invalid_messages=1)
                if n := self._invalid_log.count(peer):
                    logger.warning("dropped %d messages from %s, the last: %s", n, peer, error)
                if (request_id := protocol.peek_request_id(body)) is not None:
                    side.on_invalid_message(identity.bytes, request_id, error)

    def _begin_drain(self) -> None:
        self._drain.begin(time.monotonic())
        n_running = sum(len(worker.in_flight) for worker in self._dispatcher.workers.values())
        n_waiting = self._dispatcher.queue.n_jobs
        logger.info("stopping: %d requests in flight are finished, %d waiting ones returned", n_running, n_waiting)
        self._clients.return_waiting()

    def _is_drained(self) -> bool:
        has_work = bool(self._dispatcher.open_jobs or self._clients.blocked_clients)
        return self._drain.is_finished(time.monotonic(), has_work=has_work)
