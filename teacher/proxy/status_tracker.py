"""Observations of clients and workers, and the service status that is computed from them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.jobs import Job, RegisteredWorker
from teacher.proxy.sleep_control import SleepControl
from teacher.status import ClientStatus, ServiceStatus, ServiceTotals, WorkerStatus
from teacher.wire.frames import Frame
from teacher.wire.limits import PROTOCOL_VERSION
from teacher.wire.messages import Failure, Heartbeat, ScoreReply

_RATE_WINDOW_S = 30.0
_CLIENT_RETENTION_S = 60.0
_MAX_CLIENTS = 1000
_MAX_REASON_CHARS = 1000
_NO_PROGRESS = Heartbeat(0, 0, 0, 0.0)


@dataclass
class _ClientRecord:
    name: str
    last_message_at: float
    scored_tokens: int = 0


@dataclass
class _WorkerRecord:
    """Observations of one worker.

    Attributes:
        joined_at: Time of its registration.
        last_message_at: Time of its last message.
        heartbeats: Heartbeats of the last ``_RATE_WINDOW_S`` with their times, and the one before.
    """

    joined_at: float
    last_message_at: float
    heartbeats: deque[tuple[float, Heartbeat]] = field(default_factory=deque)

    def rates(self) -> tuple[float, float]:
        """Return tokens per second, and the share of the time in engine steps."""
        if len(self.heartbeats) < 2:
            return 0.0, 0.0
        (start, first), (end, last) = self.heartbeats[0], self.heartbeats[-1]
        duration_s = max(end - start, 1e-3)
        return (last.n_tokens - first.n_tokens) / duration_s, min(1.0, (last.busy_s - first.busy_s) / duration_s)


class StatusTracker:
    """Totals and observations of a proxy. Times come from ``time.monotonic()``.

    Attributes:
        latest: Status of the last ``refresh``.
        latest_at: Time of the last ``refresh``.
    """

    def __init__(self, dispatcher: Dispatcher, sleep: SleepControl) -> None:
        self._dispatcher, self._sleep = dispatcher, sleep
        self._started_at = time.monotonic()
        self._totals = ServiceTotals()
        self._clients: dict[bytes, _ClientRecord] = {}
        self._workers: dict[bytes, _WorkerRecord] = {}
        self.latest: ServiceStatus
        self.latest_at: float
        self.refresh(self._started_at, draining=False)

    def count(self, **increments: float) -> None:
        """Add to totals by field name."""
        totals = {name: getattr(self._totals, name) + increment for name, increment in increments.items()}
        self._totals = replace(self._totals, **totals)

    # --- clients ---

    def record_client(self, client: bytes, name: str, now: float) -> None:
        """Record a message of a client."""
        if (record := self._clients.get(client)) is not None:
            record.name, record.last_message_at = name, now
        elif len(self._clients) < _MAX_CLIENTS:
            self._clients[client] = _ClientRecord(name, now)

    def name_of(self, client: bytes) -> str:
        """Return a client's address and the end of its identity."""
        record = self._clients.get(client)
        return f"{record.name if record else 'unknown'} {client[-4:].hex()}"

    def record_result(self, job: Job, message: ScoreReply | Failure, frames: list[Frame], now: float) -> None:
        """Record the result of a job."""
        if isinstance(message, Failure):
            self.count(refused=1)
            return
        self.count(
            scored=1,
            scored_sequences=len(message.scored),
            scored_tokens=job.n_tokens,
            reply_bytes=sum(memoryview(frame).nbytes for frame in frames),
            queue_s=job.assigned_at - job.arrived_at,
            worker_s=now - job.assigned_at,
        )
        if (client := self._clients.get(job.key.client)) is not None:
            client.last_message_at = now
            client.scored_tokens += job.n_tokens

    # --- workers ---

    def record_registration(self, identity: bytes, now: float) -> None:
        """Record the registration of a worker."""
        self._workers[identity] = _WorkerRecord(now, now)

    def record_worker(self, identity: bytes, now: float, heartbeat: Heartbeat | None = None) -> None:
        """Record a message of a registered worker."""
        worker = self._workers[identity]
        worker.last_message_at = now
        if heartbeat is not None:
            worker.heartbeats.append((now, heartbeat))
            while len(worker.heartbeats) > 2 and worker.heartbeats[1][0] < now - _RATE_WINDOW_S:
                worker.heartbeats.popleft()

    def silence_s(self, identity: bytes, now: float) -> float:
        """Return the time since the last message of a registered worker, in seconds."""
        return now - self._workers[identity].last_message_at

    def record_removal(self, identity: bytes, *, signed_off: bool, n_requeued: int, n_rejected: int) -> None:
        """Record the removal of a worker, ``signed_off`` if it ended gracefully."""
        del self._workers[identity]
        self.count(workers_lost=int(not signed_off), requeued=n_requeued, rejected_after_losses=n_rejected)

    # --- status ---

    def refresh(self, now: float, *, draining: bool) -> None:
        """Compute ``latest``."""
        self.latest = self._status(now, draining=draining)
        self.latest_at = now

    def _status(self, now: float, *, draining: bool) -> ServiceStatus:
        dispatcher, info = self._dispatcher, self._dispatcher.info
        jobs_of: dict[bytes, list[Job]] = {}
        for job in dispatcher.open_jobs:
            jobs_of.setdefault(job.key.client, []).append(job)
        in_flight = {job_id for worker in dispatcher.workers.values() for job_id in worker.in_flight}
        self._clients = {
            client: record
            for client, record in self._clients.items()
            if client in jobs_of or record.last_message_at > now - _CLIENT_RETENTION_S
        }
        waiting = [job for job in dispatcher.open_jobs if job.job_id not in in_flight]
        workers = tuple(self._worker_status(worker, now) for worker in dispatcher.workers.values())
        return ServiceStatus(
            model_name=info.model_name if info is not None else "",
            n_logprobs=info.n_logprobs if info is not None else 0,
            protocol_version=PROTOCOL_VERSION,
            uptime_s=now - self._started_at,
            draining=draining,
            state=self._sleep.state,
            queue_requests=len(waiting),
            queue_tokens=sum(job.n_tokens for job in waiting),
            queue_oldest_s=_oldest_s(waiting, now),
            max_queue_tokens=dispatcher.limits.max_tokens,
            tokens_per_second=sum(worker.tokens_per_second for worker in workers),
            last_removal=dispatcher.last_removal[:_MAX_REASON_CHARS],
            workers=workers,
            clients=tuple(
                self._client_status(client, jobs_of.get(client, []), in_flight, now) for client in self._clients
            ),
            totals=self._totals,
        )

    def _worker_status(self, worker: RegisteredWorker, now: float) -> WorkerStatus:
        record = self._workers[worker.identity]
        tokens_per_second, busy_share = record.rates()
        progress = record.heartbeats[-1][1] if record.heartbeats else _NO_PROGRESS
        return WorkerStatus(
            name=worker.name,
            state=worker.state,
            joined_s=now - record.joined_at,
            since_last_message_s=now - record.last_message_at,
            requests=len(worker.in_flight),
            tokens=worker.load_tokens,
            capacity_tokens=worker.capacity_tokens,
            tokens_per_second=tokens_per_second,
            busy_share=busy_share,
            scored_sequences=progress.n_sequences,
            scored_tokens=progress.n_tokens,
        )

    def _client_status(self, client: bytes, jobs: list[Job], in_flight: set[int], now: float) -> ClientStatus:
        waiting = [job for job in jobs if job.job_id not in in_flight]
        return ClientStatus(
            name=self.name_of(client),
            waiting_requests=len(waiting),
            waiting_tokens=sum(job.n_tokens for job in waiting),
            running_requests=len(jobs) - len(waiting),
            oldest_s=_oldest_s(jobs, now),
            scored_tokens=self._clients[client].scored_tokens,
        )


def _oldest_s(jobs: list[Job], now: float) -> float:
    return max((now - job.arrived_at for job in jobs), default=0.0)
