"""Requests of several clients in one queue: who has been given the fewest tokens is next.

Start-time fair queuing (Goyal, Vin, Cheng 1996) with tokens as the cost: while two clients both wait, they are given
equally many tokens; what one does not use, others do; and who was idle has no credit from that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from teacher.wire.frames import Frame

ClientKey = tuple[bytes, int]  # (identity of the client, its request id)


@dataclass(eq=False)
class Job:
    """One request on its way. Times are the proxy's `time.monotonic()`."""

    job_id: int
    client: ClientKey
    frames: list[Frame]
    n_tokens: int
    deadline: float
    arrived: float
    given: float = 0.0
    """When a worker got it."""
    losses: int = 0
    """Workers that were lost with it."""


@dataclass(eq=False)
class _Line:
    """One client's jobs, and the tokens that it was given, on the clock that all clients share."""

    served: float
    n_tokens: int = 0
    """Of the jobs."""
    jobs: OrderedDict[int, Job] = field(default_factory=OrderedDict)


class FairQueue:
    def __init__(self) -> None:
        self.n_tokens = 0
        self.n_jobs = 0
        self._lines: dict[bytes, _Line] = {}
        self._clock = 0.0  # `served` of the line that was taken from last, before that

    def __iter__(self) -> Iterator[Job]:
        return (job for line in self._lines.values() for job in line.jobs.values())

    def add(self, job: Job) -> None:
        """At the end of its client's line."""
        line = self._lines.get(job.client[0])
        if line is None:
            line = self._lines[job.client[0]] = _Line(self._clock)
        elif not line.jobs:
            line.served = max(line.served, self._clock)
        line.jobs[job.job_id] = job
        self._count(job, 1)

    def put_back(self, job: Job) -> None:
        """A job that was taken, at the front of its client's line, as if it had not been."""
        self.add(job)
        line = self._lines[job.client[0]]
        line.jobs.move_to_end(job.job_id, last=False)
        line.served -= job.n_tokens

    def take(self, paused: Collection[bytes] = ()) -> Job | None:
        """The next job of a client that is not paused."""
        waiting = [client for client, line in self._lines.items() if line.jobs and client not in paused]
        if not waiting:
            return None
        line = self._lines[min(waiting, key=lambda client: self._lines[client].served)]
        _, job = line.jobs.popitem(last=False)
        self._clock = max(self._clock, line.served)
        line.served += job.n_tokens
        self._count(job, -1)
        self._forget_idle()
        return job

    def remove(self, job: Job) -> bool:
        """Whether it was waiting here."""
        line = self._lines.get(job.client[0])
        if line is None or line.jobs.pop(job.job_id, None) is None:
            return False
        self._count(job, -1)
        return True

    def tokens_of(self, client: bytes) -> int:
        """That wait."""
        return self._lines[client].n_tokens if client in self._lines else 0

    def jobs_of(self, client: bytes) -> int:
        """Return how many jobs of a client wait."""
        return len(self._lines[client].jobs) if client in self._lines else 0

    @property
    def n_clients(self) -> int:
        """For whom something waits."""
        return sum(1 for line in self._lines.values() if line.jobs)

    def _count(self, job: Job, sign: int) -> None:
        self.n_jobs += sign
        self.n_tokens += sign * job.n_tokens
        self._lines[job.client[0]].n_tokens += sign * job.n_tokens

    def _forget_idle(self) -> None:
        """Lines that would begin where a new one does."""
        for client in [client for client, line in self._lines.items() if not line.jobs and line.served <= self._clock]:
            del self._lines[client]
