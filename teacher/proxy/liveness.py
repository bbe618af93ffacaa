"""Detection of lost workers and clients, once per second.

A worker is lost if its connection ended, or if it was silent for too long. A worker sends heartbeats between engine
steps, so a long silence means that a step hangs. While it falls asleep or wakes up it is silent, until the deadline of
this change. While it sleeps it sends heartbeats.
"""

from __future__ import annotations

from teacher.proxy.client_side import ClientSide
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.proxy_sockets import ProxySockets, send_to_peer
from teacher.proxy.status_tracker import StatusTracker
from teacher.proxy.worker_side import CONNECTION_LOST, WorkerSide
from teacher.wire import protocol
from teacher.wire.messages import Probe

CHECK_INTERVAL_S = 1.0
STALL_TIMEOUT_S = 60.0
SILENCE_PER_STALL_TIMEOUT = 1.5
"""Allowed silence as a multiple of the time limit of a step. It includes encoding and transfer of results."""


class LivenessMonitor:
    """Periodic checks of the connections of workers and clients.

    Attributes:
        next_check_at: Time of the next check by ``time.monotonic()``.
    """

    def __init__(
        self,
        sockets: ProxySockets,
        dispatcher: Dispatcher,
        tracker: StatusTracker,
        clients: ClientSide,
        workers: WorkerSide,
        *,
        stall_timeout_s: float,
    ) -> None:
        self._backend = sockets.backend
        self._dispatcher, self._tracker, self._clients, self._workers = dispatcher, tracker, clients, workers
        self._stall_timeout_s = stall_timeout_s
        self.next_check_at = 0.0

    def check_if_due(self, now: float) -> bool:
        """Check workers and clients if the interval has passed. Return True if it has."""
        if now < self.next_check_at:
            return False
        self.next_check_at = now + CHECK_INTERVAL_S
        self._check_workers(now)
        self._clients.probe()
        self._workers.forget_reregistrations(now)
        return True

    def _check_workers(self, now: float) -> None:
        for identity, worker in list(self._dispatcher.workers.items()):
            max_silence_s = SILENCE_PER_STALL_TIMEOUT * max(self._stall_timeout_s, worker.stall_timeout_s)
            if not send_to_peer(self._backend, identity, protocol.encode(Probe())):
                self._workers.remove(identity, CONNECTION_LOST)
            elif (silence_s := self._tracker.silence_s(identity, now)) > max_silence_s:
                if worker.change is None:
                    self._workers.remove(identity, f"hung: its engine finished no step for {silence_s:.0f} s")
                elif now > worker.change.until + max_silence_s:
                    self._workers.remove(identity, f"hung: {worker.state} for {silence_s:.0f} s")
