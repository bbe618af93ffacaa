"""Assignment of requests to workers. This module uses no sockets; times are passed in.

Requests are assigned by tokens: clients take turns (``fair_queue``), and each request goes to the worker with the
fewest tokens in flight. A worker has the next request before it finishes the current one. The others wait in the proxy,
where they can still go to any worker.

==============  ===============================================  =================================================
request state   event                                            next state
==============  ===============================================  =================================================
(new)           admitted by ``QueueLimits``                      waiting
waiting         a worker has room                                in flight
quarantined     a worker is idle                                 in flight, alone on its worker
in flight       result or error from its worker                  closed
in flight       worker signed off                                waiting, at the front
in flight       worker lost, loss 1 to MAX_LOSSES - 2            waiting, at the front
in flight       worker lost, loss MAX_LOSSES - 1                 quarantined
in flight       worker lost, loss MAX_LOSSES                     closed with an error
any             canceled, or deadline passed                     closed
==============  ===============================================  =================================================
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from teacher.errors import TeacherRequestError
from teacher.proxy.admission import QueueLimits
from teacher.proxy.fair_queue import FairQueue
from teacher.proxy.jobs import MAX_LOSSES, Job, RegisteredWorker, RequestKey
from teacher.proxy.open_jobs import OpenJobs
from teacher.records import ModelInfo
from teacher.wire.frames import Frame


class RemovedJobs(NamedTuple):
    """Jobs of a removed worker.

    Attributes:
        requeued: Jobs that wait for another worker.
        rejected: Jobs that were in flight at MAX_LOSSES lost workers, with their errors.
    """

    requeued: list[Job]
    rejected: list[tuple[Job, TeacherRequestError]]


class Dispatcher:
    """Open requests and registered workers.

    Attributes:
        workers: Registered workers by identity.
        queue: Waiting jobs.
        last_removal: Reason for the most recent removal of a worker.
    """

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.limits = limits or QueueLimits()
        self.workers: dict[bytes, RegisteredWorker] = {}
        self.queue = FairQueue()
        self.last_removal = "no worker was removed"
        self._quarantined: OrderedDict[int, Job] = OrderedDict()
        self._job_ids = itertools.count(1)
        self._open = OpenJobs()

    @property
    def info(self) -> ModelInfo | None:
        """Model of the registered workers, None without a worker."""
        return next((worker.info for worker in self.workers.values()), None)

    @property
    def open_jobs(self) -> Collection[Job]:
        """Jobs that are waiting, quarantined or in flight."""
        return self._open.jobs

    # --- workers ---

    def add_worker(self, worker: RegisteredWorker) -> None:
        """Register a new worker.

        Raises:
            TeacherRequestError: It serves another model than the registered workers.
        """
        if self.info is not None and worker.info != self.info:
            raise TeacherRequestError(
                "this service serves another model than the new worker",
                options=("CKPT_PATH", "N_LOGPROBS", "MAX_MODEL_LEN", "DTYPE", "MODEL_NAME"),
                remedy="start the worker with the same CKPT_PATH, N_LOGPROBS, MAX_MODEL_LEN and DTYPE (and MODEL_NAME, "
                "if the folders have different names)",
                details=_differences(self.info, worker.info),
            )
        self.workers[worker.identity] = worker

    def remove_worker(self, identity: bytes, reason: str, *, signed_off: bool = False) -> RemovedJobs:
        """Remove a worker and requeue its jobs.

        Args:
            identity: Identity of the worker. An unknown one is ignored.
            reason: Cause, for error messages and the status.
            signed_off: True if the worker ended gracefully, so that none of its jobs can be the cause.
        """
        removed = RemovedJobs([], [])
        worker = self.workers.pop(identity, None)
        if worker is None:
            return removed
        self.last_removal = reason
        for job in reversed(worker.in_flight.values()):
            job.n_losses += not signed_off
            if job.n_losses >= MAX_LOSSES:
                self._open.close(job)
                error = TeacherRequestError(
                    f"{job.n_losses} workers were lost with this request; last: {reason}",
                    n_losses=job.n_losses,
                )
                removed.rejected.append((job, error))
                continue
            removed.requeued.append(job)
            if job.is_quarantined:
                self._quarantined[job.job_id] = job
            else:
                self.queue.requeue(job)
        return removed

    def assign(self, paused: Collection[bytes] = ()) -> tuple[RegisteredWorker, Job] | None:
        """Assign the next job to a worker with room.

        Args:
            paused: Clients whose jobs are not assigned.

        Returns:
            The worker and its new job, None if no job can be assigned.
        """
        candidates = [worker for worker in self.workers.values() if worker.can_score]
        if self._quarantined and candidates:
            least_loaded = min(candidates, key=lambda worker: worker.load_tokens)
            if not least_loaded.in_flight:
                _, job = self._quarantined.popitem(last=False)
                least_loaded.add(job)
                return least_loaded, job
            candidates.remove(least_loaded)  # it gets no new job until it is idle
        candidates = [worker for worker in candidates if worker.has_room()]
        if not candidates or (next_job := self.queue.take(paused)) is None:
            return None
        worker = min(candidates, key=lambda worker: worker.load_tokens)
        worker.add(next_job)
        return worker, next_job

    def finish(self, identity: bytes, job_id: int) -> Job | None:
        """Close a job that its worker finished. Return None if the worker does not have this job (any more)."""
        worker = self.workers.get(identity)
        job = worker.remove(job_id) if worker is not None else None
        if job is not None:
            self._open.close(job)
        return job

    # --- requests ---

    def add_job(
        self, key: RequestKey, frames: list[Frame], n_tokens: int, n_ids: int, deadline: float, now: float
    ) -> None:
        """Queue a request. A copy of an open request is ignored.

        Raises:
            QueueFull: The queue has no room for it.
        """
        if key in self._open:
            return
        self.limits.ensure_room(self.queue, key.client, n_ids)
        job = Job(next(self._job_ids), key, frames, n_tokens, n_ids, deadline, arrived_at=now)
        self._open.add(job)
        self.queue.add(job)

    def is_open(self, key: RequestKey) -> bool:
        """Return True if the request is waiting, quarantined or in flight."""
        return key in self._open

    def cancel(self, key: RequestKey) -> tuple[Job, RegisteredWorker | None] | None:
        """Close a request. Return its job and the worker that had it, None if the request is not open."""
        job = self._open.get(key)
        return (job, self._close(job)) if job is not None else None

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of an open request, None without open requests."""
        return self._open.next_deadline()

    def expire(self, now: float) -> list[tuple[Job, RegisteredWorker | None]]:
        """Close the requests whose deadline has passed. Return each job with the worker that had it."""
        expired = []
        while (job := self._open.next_expired(now)) is not None:
            expired.append((job, self._close(job)))
        return expired

    def drop_waiting(self) -> list[Job]:
        """Close and return all jobs that no worker has."""
        waiting = [*self.queue, *self._quarantined.values()]
        for job in waiting:
            self._close(job)
        return waiting

    def _close(self, job: Job) -> RegisteredWorker | None:
        """Close an open job. Return the worker that had it."""
        self._open.close(job)
        if self.queue.remove(job) or self._quarantined.pop(job.job_id, None) is not None:
            return None
        return next((worker for worker in self.workers.values() if worker.remove(job.job_id) is not None), None)


def _differences(service: ModelInfo, worker: ModelInfo) -> tuple[str, ...]:
    """Return the lines of a table of the fields that differ: name, value of the service, value of the worker."""
    rows = [("", "service", "new worker")]
    for (name, value), other in zip(service.shown().items(), worker.shown().values(), strict=True):
        if value != other:
            rows.append((name, value, other))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return tuple(line.rstrip() for line in lines)
