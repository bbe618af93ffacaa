"""Status of a running service, as shown by ``python -m teacher status``, ``/healthz`` and ``/metrics``.

Ages and durations are in seconds. Totals count from the start of the proxy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from teacher.wire.fields import Record


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Status of one registered worker. Rates are averages over the last 30 s.

    Attributes:
        name: Host and pid.
        state: ``"awake"``, ``"falling asleep"``, ``"asleep"`` or ``"waking"``.
        joined_s: Time since its registration, in seconds.
        since_last_message_s: Time since its last message, in seconds.
        requests: Requests in flight.
        tokens: Tokens in flight.
        capacity_tokens: Tokens that it accepts at a time.
        tokens_per_second: Scored tokens per second.
        busy_share: Share of the time in engine steps, 0 to 1.
        scored_sequences: Sequences scored since the worker started.
        scored_tokens: Tokens scored since the worker started.
    """

    name: str
    state: str
    joined_s: float
    since_last_message_s: float
    requests: int
    tokens: int
    capacity_tokens: int
    tokens_per_second: float
    busy_share: float
    scored_sequences: int
    scored_tokens: int


@dataclass(frozen=True, kw_only=True)
class ClientStatus:
    """Status of one client that has open requests, or sent a message in the last minute.

    Attributes:
        name: Address, and the last 4 bytes of the ZeroMQ identity in hex.
        waiting_requests: Requests that are not assigned to a worker.
        running_requests: Requests that are assigned to a worker.
        oldest_s: Age of the oldest open request in seconds, 0 without one.
    """

    name: str
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    oldest_s: float
    scored_tokens: int


@dataclass(frozen=True, kw_only=True)
class ServiceTotals:
    """Counts of requests by outcome, and sums over scored requests.

    ``queue_s / scored`` is the mean time in the queue, in seconds.

    Attributes:
        scored: Requests that were scored.
        reply_bytes: Bytes of the replies to scored requests.
        refused: Requests that a worker refused because they cannot be scored.
        expired: Requests whose deadline passed.
        rejected_after_losses: Requests that were in flight at 3 workers when these were lost.
        canceled: Requests that their client canceled, or whose client disconnected.
        retried_later: Requests that were sent back to the client because the queue was full.
        requeued: Requests that were requeued because their worker was removed.
        workers_lost: Workers that died, hung or were silent. Workers that signed off are not counted.
        invalid_messages: Messages that violate the protocol.
        queue_s: Time of scored requests in the queue, in seconds.
        worker_s: Time of scored requests at a worker, in seconds.
    """

    scored: int = 0
    scored_sequences: int = 0
    scored_tokens: int = 0
    reply_bytes: int = 0
    refused: int = 0
    expired: int = 0
    rejected_after_losses: int = 0
    canceled: int = 0
    retried_later: int = 0
    requeued: int = 0
    workers_lost: int = 0
    invalid_messages: int = 0
    queue_s: float = 0.0
    worker_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """Status of a proxy with its workers and clients.

    Attributes:
        model_name: Name of the model, empty without a worker.
        n_logprobs: Largest ``top_k`` of a request, 0 without a worker.
        protocol_version: Protocol version of the proxy.
        uptime_s: Time since the proxy started, in seconds.
        draining: True after a stop signal: requests in flight are finished, new ones are not accepted.
        state: ``"awake"``; ``"finishing"``, ``"falling asleep"`` or ``"asleep"``, in which new requests are refused; or
            ``"waking"``.
        queue_requests: Requests that are not assigned to a worker.
        queue_tokens: Tokens of these requests.
        queue_oldest_s: Age of the oldest of these requests, in seconds.
        max_queue_tokens: Limit of ``queue_tokens``, above which clients receive ``RetryLater``.
        tokens_per_second: Sum over all workers.
        last_removal: Reason for the most recent removal of a worker, including sign-offs. "no worker was removed"
            before the first.
        workers: Registered workers.
        totals: Counts since the start.
    """

    model_name: str
    n_logprobs: int
    protocol_version: int
    uptime_s: float
    draining: bool
    state: str
    queue_requests: int
    queue_tokens: int
    queue_oldest_s: float
    max_queue_tokens: int
    tokens_per_second: float
    last_removal: str
    workers: tuple[WorkerStatus, ...]
    clients: tuple[ClientStatus, ...]
    totals: ServiceTotals

    def to_dict(self) -> dict[str, Any]:
        """Return the status as nested dictionaries and lists of JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> ServiceStatus:
        """Make a status from the result of ``to_dict``.

        Raises:
            TeacherProtocolError: Keys or types differ.
        """
        return cast(ServiceStatus, Record(cls).read(values, cls.__name__))
