"""Records of the dispatcher: a request on its way through the proxy, and a registered worker with its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from teacher.records import ModelInfo
from teacher.wire.frames import Frame

MAX_LOSSES = 3
"""Lost workers after which a request is regarded as the cause and fails.

After ``MAX_LOSSES - 1`` losses the request is quarantined: it runs alone on a worker, so that another loss does not
count against other requests.
"""


class RequestKey(NamedTuple):
    """Identity of a request: the client's ZeroMQ identity and the client's request id."""

    client: bytes
    request_id: int


@dataclass(eq=False)
class Job:
    """A request of a client. Times come from ``time.monotonic()`` in the proxy.

    Attributes:
        job_id: Request id between proxy and worker.
        key: Request id between client and proxy.
        frames: Message as received.
        n_tokens: Tokens of its sequences.
        n_ids: Ids in its arrays: tokens, and support ids.
        deadline: Time at which it expires.
        arrived_at: Time of its arrival.
        assigned_at: Time at which a worker got it, 0 before.
        n_losses: Workers that were lost while they had it.
    """

    job_id: int
    key: RequestKey
    frames: list[Frame]
    n_tokens: int
    n_ids: int
    deadline: float
    arrived_at: float
    assigned_at: float = 0.0
    n_losses: int = 0

    @property
    def is_quarantined(self) -> bool:
        """True if the job may only run on a worker without other jobs."""
        return self.n_losses >= MAX_LOSSES - 1


class StateChange(NamedTuple):
    """Change of a worker between awake and asleep.

    Attributes:
        change_id: Request id between proxy and worker.
        asleep: State after the change.
        until: Deadline of the change by ``time.monotonic()``. The worker may be silent until then.
    """

    change_id: int
    asleep: bool
    until: float


@dataclass(eq=False)
class RegisteredWorker:
    """A registered worker and its jobs.

    Attributes:
        identity: ZeroMQ identity.
        name: Host and pid.
        capacity_tokens: Tokens that it accepts at a time.
        stall_timeout_s: Its own time limit of an engine step, in seconds; 0 for no limit.
        has_sleep_mode: True if it can sleep.
        is_asleep: True if it sleeps, as far as the proxy was told.
        change: Change of this state that is not confirmed yet.
        in_flight: Its jobs by job id, oldest first.
        load_tokens: Tokens of its jobs.
    """

    identity: bytes
    name: str
    info: ModelInfo
    capacity_tokens: int
    stall_timeout_s: float = 0.0
    has_sleep_mode: bool = False
    is_asleep: bool = False
    change: StateChange | None = None
    in_flight: dict[int, Job] = field(default_factory=dict)
    load_tokens: int = 0

    @property
    def can_score(self) -> bool:
        """True if it is awake and is to stay so."""
        return not self.is_asleep and self.change is None

    @property
    def state(self) -> str:
        """``"awake"``, ``"asleep"``, ``"falling asleep"`` or ``"waking"``."""
        if self.change is not None:
            return "falling asleep" if self.change.asleep else "waking"
        return "asleep" if self.is_asleep else "awake"

    def has_room(self) -> bool:
        """Return True if it may get another job: it has fewer than two, or is below its capacity."""
        first = next(iter(self.in_flight.values()), None)
        if first is not None and first.is_quarantined:
            return False
        return len(self.in_flight) < 2 or self.load_tokens < self.capacity_tokens

    def add(self, job: Job) -> None:
        """Add a job."""
        self.in_flight[job.job_id] = job
        self.load_tokens += job.n_tokens

    def remove(self, job_id: int) -> Job | None:
        """Remove a job and return it, None if the worker does not have it."""
        job = self.in_flight.pop(job_id, None)
        self.load_tokens -= job.n_tokens if job is not None else 0
        return job
