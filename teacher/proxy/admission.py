"""Admission of requests to the proxy's queue, limited by ids and by count, with a fair share for every client."""

from __future__ import annotations

from dataclasses import dataclass

from teacher.proxy.fair_queue import FairQueue

MAX_QUEUE_TOKENS = 8 << 20
MAX_QUEUE_REQUESTS = 65_536
OVERFILL_FACTOR = 2
"""Factor by which the queue may exceed its limits while clients below their share add requests."""


class QueueFull(Exception):
    """The queue has no room for a request. The client is to send it again later.

    Attributes:
        n_requests: Number of waiting requests.
        n_ids: Their tokens and support ids.
    """

    def __init__(self, n_requests: int, n_ids: int) -> None:
        super().__init__(n_requests, n_ids)
        self.n_requests, self.n_ids = n_requests, n_ids

    def __str__(self) -> str:
        return f"{self.n_requests} requests with {self.n_ids} tokens and support ids wait already"


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the queue.

    Attributes:
        max_tokens: Tokens and support ids of the waiting requests. Each takes 4 bytes of the proxy's memory.
        max_requests: Number of waiting requests.
    """

    max_tokens: int = MAX_QUEUE_TOKENS
    max_requests: int = MAX_QUEUE_REQUESTS

    def ensure_room(self, queue: FairQueue, client: bytes, n_ids: int) -> None:
        """Check that a request may enter the queue.

        Each client may always have one waiting request. Beyond that, a full queue accepts only clients below their
        share (the limit divided by the number of waiting clients), and none above ``OVERFILL_FACTOR`` times the limit.

        Raises:
            QueueFull: It may not.
        """
        if queue.jobs_of(client) == 0:
            return
        for total, used, limit in (
            (queue.n_ids + n_ids, queue.ids_of(client) + n_ids, self.max_tokens),
            (queue.n_jobs + 1, queue.jobs_of(client) + 1, self.max_requests),
        ):
            if total > OVERFILL_FACTOR * limit or (total > limit and used > limit // queue.n_clients):
                raise QueueFull(queue.n_jobs, queue.n_ids)
