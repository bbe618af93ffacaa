"""Queue of the waiting jobs of several clients. The client that was served the fewest tokens is next.

Start-time fair queuing (Goyal, Vin, Cheng 1996) with tokens as the cost: two clients that both wait are served equally
many tokens, unused shares go to the other clients, and an idle client earns no credit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from teacher.proxy.jobs import Job


@dataclass(eq=False)
class _ClientQueue:
    """Jobs of one client.

    Attributes:
        served_tokens: Tokens served to the client, on the virtual clock that all clients share.
        n_ids: Ids of the waiting jobs.
        jobs: Waiting jobs by job id, in the order of service.
    """

    served_tokens: float
    n_ids: int = 0
    jobs: OrderedDict[int, Job] = field(default_factory=OrderedDict)


class FairQueue:
    """Waiting jobs by client.

    Attributes:
        n_ids: Ids of all waiting jobs, which determine their memory.
        n_jobs: Number of waiting jobs.
    """

    def __init__(self) -> None:
        self.n_ids = 0
        self.n_jobs = 0
        self._clients: dict[bytes, _ClientQueue] = {}
        self._clock_tokens = 0.0  # largest `served_tokens` at which a job was taken

    def __iter__(self) -> Iterator[Job]:
        return (job for queue in self._clients.values() for job in queue.jobs.values())

    def add(self, job: Job) -> None:
        """Add a job behind its client's other jobs."""
        queue = self._clients.get(job.key.client)
        if queue is None:
            queue = self._clients[job.key.client] = _ClientQueue(self._clock_tokens)
        elif not queue.jobs:
            queue.served_tokens = max(queue.served_tokens, self._clock_tokens)
        queue.jobs[job.job_id] = job
        self._count(job, 1)

    def requeue(self, job: Job) -> None:
        """Return a taken job to the front of its client's jobs and refund its tokens."""
        self.add(job)
        queue = self._clients[job.key.client]
        queue.jobs.move_to_end(job.job_id, last=False)
        queue.served_tokens -= job.n_tokens

    def take(self, paused: Collection[bytes] = ()) -> Job | None:
        """Remove and return the next job, None if there is none.

        Args:
            paused: Clients whose jobs are not taken.
        """
        waiting = [client for client, queue in self._clients.items() if queue.jobs and client not in paused]
        if not waiting:
            return None
        queue = self._clients[min(waiting, key=lambda client: self._clients[client].served_tokens)]
        _, job = queue.jobs.popitem(last=False)
        self._clock_tokens = max(self._clock_tokens, queue.served_tokens)
        queue.served_tokens += job.n_tokens
        self._count(job, -1)
        self._forget_idle_clients()
        return job

    def remove(self, job: Job) -> bool:
        """Remove a job. Return False if it is not in the queue."""
        queue = self._clients.get(job.key.client)
        if queue is None or queue.jobs.pop(job.job_id, None) is None:
            return False
        self._count(job, -1)
        return True

    def ids_of(self, client: bytes) -> int:
        """Return the ids of a client's waiting jobs."""
        return self._clients[client].n_ids if client in self._clients else 0

    def jobs_of(self, client: bytes) -> int:
        """Return the number of a client's waiting jobs."""
        return len(self._clients[client].jobs) if client in self._clients else 0

    @property
    def n_clients(self) -> int:
        """Number of clients with waiting jobs."""
        return sum(1 for queue in self._clients.values() if queue.jobs)

    def _count(self, job: Job, sign: int) -> None:
        self.n_jobs += sign
        self.n_ids += sign * job.n_ids
        self._clients[job.key.client].n_ids += sign * job.n_ids

    def _forget_idle_clients(self) -> None:
        """Remove the clients without jobs whose state equals a new client's."""
        idle = [
            client
            for client, queue in self._clients.items()
            if not queue.jobs and queue.served_tokens <= self._clock_tokens
        ]
        for client in idle:
            del self._clients[client]
