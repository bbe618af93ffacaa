"""What the proxy notices about its clients and workers, and the status that follows from it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from teacher.proxy.dispatch import Dispatcher, Worker
from teacher.proxy.fair_queue import Job
from teacher.status import ClientStatus, ServiceStatus, Totals, WorkerStatus
from teacher.wire.frames import Frame
from teacher.wire.messages import PROTOCOL_VERSION, Answer, Failure, Pulse

_WINDOW_S = 30.0  # of tokens per second
_CLIENT_KEPT_S = 60.0
_MAX_CLIENTS = 1000  # that are shown
_MAX_REASON_CHARS = 1000


@dataclass
class _Client:
    name: str
    heard: float
    answered_tokens: int = 0


@dataclass
class _Worker:
    joined: float
    heard: float
    pulses: deque[tuple[float, Pulse]] = field(default_factory=deque)
    """Of the last half minute, and the one before."""

    def rates(self) -> tuple[float, float]:
        """Tokens a second, and the share of the time spent in engine steps."""
        if len(self.pulses) < 2:
            return 0.0, 0.0
        (since, first), (until, last) = self.pulses[0], self.pulses[-1]
        seconds = max(until - since, 1e-3)
        return (last.n_tokens - first.n_tokens) / seconds, min(1.0, (last.busy_s - first.busy_s) / seconds)


class Overview:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._began = time.monotonic()
        self._totals = Totals()
        self._clients: dict[bytes, _Client] = {}
        self._workers: dict[bytes, _Worker] = {}

    def count(self, **more: float) -> None:
        """Add to totals, by name."""
        self._totals = replace(
            self._totals, **{name: getattr(self._totals, name) + number for name, number in more.items()}
        )

    # --- clients ---

    def heard_client(self, client: bytes, name: str, now: float) -> None:
        if (known := self._clients.get(client)) is not None:
            known.name, known.heard = name, now
        elif len(self._clients) < _MAX_CLIENTS:
            self._clients[client] = _Client(name, now)

    def name_of(self, client: bytes) -> str:
        known = self._clients.get(client)
        return f"{known.name if known else 'unknown'} {client[-4:].hex()}"

    def finished(self, job: Job, message: Answer | Failure, frames: list[Frame], now: float) -> None:
        """A worker is done with a request."""
        if isinstance(message, Failure):
            self.count(refused=1)
            return
        self.count(
            answered=1,
            answered_sequences=len(message.answers),
            answered_tokens=job.n_tokens,
            answered_bytes=sum(memoryview(frame).nbytes for frame in frames),
            waited_seconds=job.given - job.arrived,
            scored_seconds=now - job.given,
        )
        if (client := self._clients.get(job.client[0])) is not None:
            client.heard = now
            client.answered_tokens += job.n_tokens

    # --- workers ---

    def joined(self, identity: bytes, now: float) -> None:
        self._workers[identity] = _Worker(now, now)

    def heard_worker(self, identity: bytes, now: float, pulse: Pulse | None = None) -> None:
        worker = self._workers[identity]
        worker.heard = now
        if pulse is not None:
            worker.pulses.append((now, pulse))
            while len(worker.pulses) > 2 and worker.pulses[1][0] < now - _WINDOW_S:
                worker.pulses.popleft()

    def silent_s(self, identity: bytes, now: float) -> float:
        return now - self._workers[identity].heard

    def lost(self, identity: bytes, *, left: bool, repeated: int, given_up: int) -> None:
        del self._workers[identity]
        self.count(workers_lost=int(not left), repeated=repeated, given_up=given_up)

    # --- the whole ---

    def status(self, now: float, *, draining: bool) -> ServiceStatus:
        dispatcher = self._dispatcher
        jobs: dict[bytes, list[Job]] = {}
        for job in dispatcher.open_jobs:
            jobs.setdefault(job.client[0], []).append(job)
        running = {job.job_id for worker in dispatcher.workers.values() for job in worker.in_flight.values()}
        self._clients = {
            client: known
            for client, known in self._clients.items()
            if client in jobs or known.heard > now - _CLIENT_KEPT_S
        }
        waiting = [job for own in jobs.values() for job in own if job.job_id not in running]
        workers = tuple(self._worker(worker, now) for worker in dispatcher.workers.values())
        info = dispatcher.info
        return ServiceStatus(
            model_name=info.model_name if info is not None else "",
            n_logprobs=info.n_logprobs if info is not None else 0,
            protocol_version=PROTOCOL_VERSION,
            uptime_s=now - self._began,
            draining=draining,
            queue_requests=len(waiting),
            queue_tokens=sum(job.n_tokens for job in waiting),
            queue_oldest_s=_oldest_s(waiting, now),
            max_queue_tokens=dispatcher.max_queue_tokens,
            tokens_per_second=sum(worker.tokens_per_second for worker in workers),
            last_loss=dispatcher.last_loss[:_MAX_REASON_CHARS],
            workers=workers,
            clients=tuple(
                self._client(client, known, jobs.get(client, []), running, now)
                for client, known in self._clients.items()
            ),
            totals=self._totals,
        )

    def _worker(self, worker: Worker, now: float) -> WorkerStatus:
        known = self._workers[worker.identity]
        tokens_per_second, busy_share = known.rates()
        last = known.pulses[-1][1] if known.pulses else Pulse(0, 0, 0, 0.0)
        return WorkerStatus(
            name=worker.name,
            joined_s=now - known.joined,
            heard_s=now - known.heard,
            requests=len(worker.in_flight),
            tokens=worker.load_tokens,
            capacity_tokens=worker.capacity_tokens,
            tokens_per_second=tokens_per_second,
            busy_share=busy_share,
            scored_sequences=last.n_sequences,
            scored_tokens=last.n_tokens,
        )

    def _client(self, client: bytes, known: _Client, own: list[Job], running: set[int], now: float) -> ClientStatus:
        waiting = [job for job in own if job.job_id not in running]
        return ClientStatus(
            name=self.name_of(client),
            waiting_requests=len(waiting),
            waiting_tokens=sum(job.n_tokens for job in waiting),
            running_requests=len(own) - len(waiting),
            oldest_s=_oldest_s(own, now),
            answered_tokens=known.answered_tokens,
        )


def _oldest_s(jobs: list[Job], now: float) -> float:
    return max((now - job.arrived for job in jobs), default=0.0)
