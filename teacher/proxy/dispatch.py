"""Which request goes to which worker, and what becomes of those whose worker is lost: the proxy's memory, no sockets.

Work is dealt by tokens: clients in turn (`fair_queue`), each request to the worker with the fewest tokens in flight. A
worker always has one request to begin when it ends another, and not many more: what waits, waits here, where it can
still go to any worker. All losses of a worker end in `remove_worker`, which puts its requests back to the front.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from teacher.errors import TeacherError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.proxy.fair_queue import ClientKey, FairQueue, Job
from teacher.records import ModelInfo
from teacher.wire.frames import Frame
from teacher.wire.sockets import LOOK_HINT

# After so many lost workers a request is taken to be the cause; the one before, it has a worker for itself, so that
# those that were only there at the time are not taken for it.
MAX_LOSSES = 3
MAX_QUEUE_TOKENS = 8 << 20  # of 4 bytes
MAX_QUEUE_REQUESTS = 65_536
# The whole queue may exceed both limits by this factor, while clients that have less than their share fill it up.
OVERFILL = 2


class QueueFull(Exception):
    """The request was not taken; its client is to keep it."""


@dataclass(eq=False)
class Worker:
    """A registered worker and what it was given."""

    identity: bytes
    name: str
    info: ModelInfo
    capacity_tokens: int
    stall_timeout_s: float = 0.0
    """The worker's own limit of an engine step; 0: none."""
    in_flight: dict[int, Job] = field(default_factory=dict)
    load_tokens: int = 0

    def has_room(self) -> bool:
        first = next(iter(self.in_flight.values()), None)
        if first is not None and _is_suspect(first):  # which is given to an idle worker only
            return False
        return len(self.in_flight) < 2 or self.load_tokens < self.capacity_tokens

    def give(self, job: Job) -> None:
        self.in_flight[job.job_id] = job
        self.load_tokens += job.n_tokens

    def take(self, job_id: int) -> Job | None:
        job = self.in_flight.pop(job_id, None)
        self.load_tokens -= job.n_tokens if job is not None else 0
        return job


class Dispatcher:
    """Every open request is either waiting (in the queue, or among the suspects) or in flight at one worker."""

    def __init__(self, max_queue_tokens: int = MAX_QUEUE_TOKENS, max_queue_requests: int = MAX_QUEUE_REQUESTS) -> None:
        self.max_queue_tokens, self.max_queue_requests = max_queue_tokens, max_queue_requests
        self.workers: dict[bytes, Worker] = {}
        self.queue = FairQueue()
        self.last_loss = "none has registered yet"
        self._suspects: OrderedDict[int, Job] = OrderedDict()
        self._ids = itertools.count(1)
        self._open: dict[ClientKey, Job] = {}
        self._deadlines: list[tuple[float, int, Job]] = []

    @property
    def info(self) -> ModelInfo | None:
        """What the workers of now have in common."""
        return next((worker.info for worker in self.workers.values()), None)

    @property
    def open_jobs(self) -> Collection[Job]:
        return self._open.values()

    # --- workers ---

    def add_worker(self, worker: Worker) -> None:
        """Register a worker that is not known.

        Raises: TeacherRequestError if it serves another model than the workers that are here.
        """
        if self.info is not None and worker.info != self.info:
            raise TeacherRequestError(
                f"this service serves {self.info}, the worker that wants to join serves {worker.info}; start it with "
                "the same CKPT_PATH, N_LOGPROBS, MAX_MODEL_LEN and DTYPE (and MODEL_NAME, if the folders have "
                "different names)"
            )
        self.workers[worker.identity] = worker

    def remove_worker(
        self, identity: bytes, reason: str, *, left: bool = False
    ) -> tuple[list[Job], list[tuple[Job, TeacherRequestError]]]:
        """Forget a worker: which of its requests wait again, and which were lost too often.

        Args:
            left: it ended as it should, so none of its requests can be the cause.
        """
        worker = self.workers.pop(identity, None)
        if worker is None:
            return [], []
        self.last_loss = reason
        repeated, given_up = [], []
        for job in reversed(worker.in_flight.values()):
            job.losses += not left
            if job.losses < MAX_LOSSES:
                repeated.append(job)
                if _is_suspect(job):
                    self._suspects[job.job_id] = job
                else:
                    self.queue.put_back(job)
            else:
                self._is_over(job)
                error = TeacherRequestError(f"{job.losses} workers were lost with this request; last: {reason}")
                given_up.append((job, error))
        return repeated, given_up

    def assign(self, paused: Collection[bytes] = ()) -> tuple[Worker, Job] | None:
        """Give the next request, of a client that is not paused, to a worker that has room."""
        workers = list(self.workers.values())
        if self._suspects and workers:  # the emptiest worker takes nothing else until it is idle
            emptiest = min(workers, key=lambda worker: worker.load_tokens)
            if not emptiest.in_flight:
                _, suspect = self._suspects.popitem(last=False)
                emptiest.give(suspect)
                return emptiest, suspect
            workers.remove(emptiest)
        with_room = [worker for worker in workers if worker.has_room()]
        if not with_room or (job := self.queue.take(paused)) is None:
            return None
        worker = min(with_room, key=lambda worker: worker.load_tokens)
        worker.give(job)
        return worker, job

    def finish(self, identity: bytes, job_id: int) -> Job | None:
        """A worker is done with a request. None if it was never, or is no longer, this worker's."""
        worker = self.workers.get(identity)
        job = worker.take(job_id) if worker is not None else None
        if job is not None:
            self._is_over(job)
        return job

    # --- requests ---

    def add_job(self, client: ClientKey, frames: list[Frame], n_tokens: int, deadline: float, now: float) -> None:
        """Queue a request; a copy of one that is still open is ignored.

        Raises: QueueFull if the queue is full, by tokens or by count, and this client has its share of it; and to every
            client once the queue is full ``OVERFILL`` times. So nobody fills it for the others, and its memory is
            bounded. One request of each client always has a place.
        """
        if client in self._open:
            return
        if self.queue.jobs_of(client[0]) and self._is_full_for(client[0], n_tokens):
            raise QueueFull(f"{self.queue.n_jobs} requests with {self.queue.n_tokens} tokens wait already")
        job = Job(next(self._ids), client, frames, n_tokens, deadline, arrived=now)
        self._open[client] = job
        self.queue.add(job)
        heapq.heappush(self._deadlines, (deadline, job.job_id, job))

    def _is_full_for(self, client: bytes, n_tokens: int) -> bool:
        """Return True if one more request of a client that has some is too many, by tokens or by count."""
        queue = self.queue
        return any(
            total > OVERFILL * limit or (total > limit and own > limit // queue.n_clients)
            for total, own, limit in (
                (queue.n_tokens + n_tokens, queue.tokens_of(client) + n_tokens, self.max_queue_tokens),
                (queue.n_jobs + 1, queue.jobs_of(client) + 1, self.max_queue_requests),
            )
        )

    def cancel(self, client: ClientKey) -> tuple[Job, Worker | None] | None:
        """Forget a request, if it is open: it, and the worker that had it."""
        job = self._open.get(client)
        return (job, self._close(job)) if job is not None else None

    def next_deadline(self) -> float | None:
        while self._deadlines and self._open.get(self._deadlines[0][2].client) is not self._deadlines[0][2]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[tuple[Job, Worker | None]]:
        """Forget the requests whose deadline has passed: each with the worker that had it."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, _, job = heapq.heappop(self._deadlines)
            expired.append((job, self._close(job)))
        return expired

    def deadline_error(self, worker: Worker | None) -> TeacherError:
        """Return the error of a request whose deadline has passed at ``worker``, or before a worker had it."""
        if worker is not None:
            return TeacherTimeout(
                f"worker {worker.name} had the request but did not finish it in time; it may be slow (raise the "
                f"timeout, add workers) or its engine may hang: {LOOK_HINT}"
            )
        if self.workers:
            return TeacherTimeout(f"all {len(self.workers)} workers were busy until the deadline; add workers or time")
        return self.no_worker()

    def no_worker(self) -> TeacherUnavailable:
        """Return the error of what waited for a worker until its deadline, with the reason why there is none."""
        return TeacherUnavailable(
            f"the proxy has no worker ({self.last_loss}); look at the worker's log, or add one with "
            "teacher/join_server.sh"
        )

    def drop_waiting(self) -> list[Job]:
        """Forget all that no worker has."""
        waiting = [*self.queue, *self._suspects.values()]
        for job in waiting:
            self._close(job)
        return waiting

    def _close(self, job: Job) -> Worker | None:
        """Forget an open request wherever it is; the worker that had it."""
        self._is_over(job)
        if self.queue.remove(job) or self._suspects.pop(job.job_id, None) is not None:
            return None
        for worker in self.workers.values():
            if worker.take(job.job_id) is not None:
                return worker
        return None

    def _is_over(self, job: Job) -> None:
        del self._open[job.client]
        if len(self._deadlines) > 2 * len(self._open) + 64:  # else its frames would stay until its time is over
            self._deadlines = [entry for entry in self._deadlines if self._open.get(entry[2].client) is entry[2]]
            heapq.heapify(self._deadlines)


def _is_suspect(job: Job) -> bool:
    return job.losses >= MAX_LOSSES - 1
