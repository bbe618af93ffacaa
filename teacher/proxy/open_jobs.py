"""Table of the open jobs: those without a result, by request key, with their deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from teacher.proxy.jobs import Job, RequestKey

_MIN_STALE_ENTRIES = 64


class OpenJobs:
    """Open jobs by request key, and a heap of their deadlines."""

    def __init__(self) -> None:
        self._jobs: dict[RequestKey, Job] = {}
        self._deadlines: list[tuple[float, int, Job]] = []  # contains closed jobs too, until they are pruned

    def __contains__(self, key: object) -> bool:
        return key in self._jobs

    @property
    def jobs(self) -> Collection[Job]:
        """All open jobs."""
        return self._jobs.values()

    def get(self, key: RequestKey) -> Job | None:
        """Return the open job of a request, None if there is none."""
        return self._jobs.get(key)

    def add(self, job: Job) -> None:
        """Add a job."""
        self._jobs[job.key] = job
        heapq.heappush(self._deadlines, (job.deadline, job.job_id, job))

    def close(self, job: Job) -> None:
        """Remove a job."""
        del self._jobs[job.key]
        # Without pruning, the frames of a closed job would stay in memory until its deadline.
        if len(self._deadlines) > 2 * len(self._jobs) + _MIN_STALE_ENTRIES:
            self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[2])]
            heapq.heapify(self._deadlines)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of an open job, None without open jobs."""
        while self._deadlines and not self._is_open(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def next_expired(self, now: float) -> Job | None:
        """Return an open job whose deadline has passed, None if there is none."""
        deadline = self.next_deadline()
        return self._deadlines[0][2] if deadline is not None and deadline <= now else None

    def _is_open(self, job: Job) -> bool:
        return self._jobs.get(job.key) is job
