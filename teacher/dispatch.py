"""Which request goes to which worker, and when a request has waited long enough: the proxy's memory, without sockets.

All losses of a worker (it said bye, its connection is gone, it registers again) end in `remove_worker`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from teacher.errors import TeacherRequestError, TeacherUnavailable
from teacher.protocol import Frame
from teacher.records import ModelInfo

# A request that was lost with this many workers is taken to be the cause.
MAX_ATTEMPTS = 2
MAX_WAITING = 65_536

ClientKey = tuple[bytes, int]  # (identity of the client, its request id)


@dataclass(eq=False)
class Job:
    """One request on its way. `deadline` is the proxy's `time.monotonic()`."""

    job_id: int
    client: ClientKey
    frames: list[Frame]
    n_tokens: int
    deadline: float
    attempts: int = 0


@dataclass(eq=False)
class Worker:
    """A registered worker and what it was given. `in_flight` includes jobs whose client gave up: they cost time."""

    identity: bytes
    info: ModelInfo
    capacity_tokens: int
    in_flight: dict[int, Job] = field(default_factory=dict)

    @property
    def load_tokens(self) -> int:
        return sum(job.n_tokens for job in self.in_flight.values())

    def has_room_for(self, job: Job) -> bool:
        """A job above the capacity is taken by an idle worker: the engine cuts it into steps."""
        return not self.in_flight or self.load_tokens + job.n_tokens <= self.capacity_tokens


class Dispatcher:
    """First come, first served; to the worker with the fewest tokens in flight."""

    def __init__(self) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.last_loss = "none has registered yet"
        self._ids = itertools.count(1)
        self._open: dict[int, Job] = {}  # neither answered nor expired
        self._job_of_client: dict[ClientKey, int] = {}
        self._waiting: deque[int] = deque()
        self._deadlines: list[tuple[float, int]] = []

    @property
    def info(self) -> ModelInfo | None:
        """What the workers of now have in common."""
        return next((worker.info for worker in self.workers.values()), None)

    def add_worker(self, identity: bytes, info: ModelInfo, capacity_tokens: int) -> None:
        """Register a worker that is not known.

        Raises: TeacherRequestError if it serves another model than the workers that are here.
        """
        if self.info is not None and info != self.info:
            raise TeacherRequestError(
                f"this service serves {self.info}, the worker that wants to join serves {info}; start it with the same "
                "CKPT_PATH, N_LOGPROBS, MAX_MODEL_LEN and DTYPE (and MODEL_NAME, if the folders have different names)"
            )
        self.workers[identity] = Worker(identity, info, capacity_tokens)

    def remove_worker(self, identity: bytes, reason: str) -> list[tuple[ClientKey, TeacherUnavailable]]:
        """Forget a worker. Its requests go back to the front of the queue; those that failed too often are returned."""
        worker = self.workers.pop(identity, None)
        if worker is None:
            return []
        self.last_loss = reason
        given_up = []
        for job in reversed(worker.in_flight.values()):
            if job.job_id not in self._open:
                continue
            if job.attempts < MAX_ATTEMPTS:
                self._waiting.appendleft(job.job_id)
            else:
                self._close(job)
                error = TeacherUnavailable(f"{job.attempts} workers were lost with this request; last: {reason}")
                given_up.append((job.client, error))
        return given_up

    def add_job(self, client: ClientKey, frames: list[Frame], n_tokens: int, deadline: float) -> None:
        """Queue a request; a copy of one that is still open is ignored.

        Raises: TeacherUnavailable if the queue is full.
        """
        if client in self._job_of_client:
            return
        if len(self._open) >= MAX_WAITING:
            raise TeacherUnavailable(f"{len(self._open)} requests wait already; add workers, or ask less at once")
        job = Job(next(self._ids), client, frames, n_tokens, deadline)
        self._open[job.job_id] = job
        self._job_of_client[client] = job.job_id
        self._waiting.append(job.job_id)
        heapq.heappush(self._deadlines, (deadline, job.job_id))

    def assign(self) -> tuple[Worker, Job] | None:
        """Take the next request that a worker has room for; it counts as in flight from now on."""
        while self._waiting and self._waiting[0] not in self._open:
            self._waiting.popleft()
        if not self._waiting or not self.workers:
            return None
        job = self._open[self._waiting[0]]
        worker = min(self.workers.values(), key=lambda w: w.load_tokens)
        if not worker.has_room_for(job):
            return None
        self._waiting.popleft()
        job.attempts += 1
        worker.in_flight[job.job_id] = job
        return worker, job

    def finish(self, worker_identity: bytes, job_id: int) -> ClientKey | None:
        """A worker is done with a job. Returns whom to tell; None if nobody waits or it was never this worker's."""
        worker = self.workers.get(worker_identity)
        job = worker.in_flight.pop(job_id, None) if worker is not None else None
        if job is None or job_id not in self._open:
            return None
        self._close(job)
        return job.client

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[tuple[Job, bool]]:
        """Requests whose deadline has passed, each with whether a worker was at it."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            job = self._open[heapq.heappop(self._deadlines)[1]]
            self._close(job)
            expired.append((job, any(job.job_id in worker.in_flight for worker in self.workers.values())))
        return expired

    def close_all(self) -> list[ClientKey]:
        """Forget all requests; returns whom to tell."""
        clients = list(self._job_of_client)
        for job in list(self._open.values()):
            self._close(job)
        return clients

    def _close(self, job: Job) -> None:
        del self._open[job.job_id]
        del self._job_of_client[job.client]
