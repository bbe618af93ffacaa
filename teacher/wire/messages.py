"""Messages between client, proxy and workers. Each is declared here once, with the wire types of its fields.

Encoding, decoding, limits and the table in ``docs/teacher_service.md`` are derived from these classes. A changed kind
or field requires a new ``PROTOCOL_VERSION``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from teacher.errors import TeacherError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.error_fields import TEXT, ErrorFields
from teacher.wire.fields import MAX_COUNT, Checked, Flag, Integer, Number, Record, Text, WireType, wire_types
from teacher.wire.limits import LIMITS, WireDtype
from teacher.wire.payloads import Scores, Sequences, Settings, StatusText
from teacher.wire.request_checks import check_wire_dtype

MESSAGES: dict[str, type[Message]] = {}
"""All messages by kind."""

REQUEST_ID = Integer(0, 2**63 - 1, entries=("id",))
RequestId = Annotated[int, REQUEST_ID]
Timeout = Annotated[float, Number(0, LIMITS.timeout_s)]
Boolean = Annotated[bool, Flag()]
Reason = Annotated[str, TEXT]
Total = Annotated[int, Integer(0, 2**62)]
Capacity = Annotated[int, Integer(1, MAX_COUNT)]

_MAX_WORKER_NAME_CHARS = 256  # the status contains the names of all workers


class Message:
    """Base of all messages.

    Attributes:
        kind: Value of the header entry ``kind``.
        route: Sender and receivers.
    """

    kind: ClassVar[str]
    route: ClassVar[str]

    def __init_subclass__(cls, kind: str, route: str) -> None:
        """Register a message."""
        cls.kind, cls.route = kind, route
        MESSAGES[kind] = cls

    @classmethod
    def wire_types(cls) -> dict[str, WireType]:
        """Return the wire types of the fields."""
        return wire_types(cls)  # type: ignore[arg-type]  # mypy takes the hash of an instance for the class's hash


@dataclass(frozen=True)
class Hello(Message, kind="hello", route="client -> proxy"):
    """Request for the ``TeacherInfo`` of a service. The proxy replies when it has a worker, or at the deadline."""

    request_id: RequestId
    timeout_s: Timeout


@dataclass(frozen=True)
class Info(Message, kind="info", route="proxy -> client"):
    """Reply to ``Hello``."""

    request_id: RequestId
    info: Annotated[TeacherInfo, Record(TeacherInfo)]


@dataclass(frozen=True)
class StatusRequest(Message, kind="status_request", route="client -> proxy"):
    """Request for the ``ServiceStatus`` of a service."""

    request_id: RequestId
    timeout_s: Timeout


@dataclass(frozen=True)
class Status(Message, kind="status", route="proxy -> client"):
    """Reply to ``StatusRequest``."""

    request_id: RequestId
    status: Annotated[ServiceStatus, StatusText()]


@dataclass(frozen=True)
class Score(Message, kind="score", route="client -> proxy -> worker"):
    """Request for the scores of sequences.

    Attributes:
        request_id: Id chosen by the sender. The proxy replaces the client's id by its own job id.
        timeout_s: Remaining time until the deadline, in seconds.
        sequences: Sequences to score, at least one.
        logits: Temperature, and number of ids with a probability.
        top_k: Log-probabilities per position, 0 for all that the model returns.
        wire_dtype: Dtype of the returned log-probabilities.
        model: ``ModelInfo.identity`` that must serve the request, empty for any model.
    """

    request_id: RequestId
    timeout_s: Timeout
    sequences: Annotated[Sequence[TeacherSequence], Sequences()]
    logits: Annotated[LogitSettings, Settings()] = field(default_factory=LogitSettings)
    top_k: Annotated[int, Integer(0, LIMITS.vocab_size)] = 0
    wire_dtype: Annotated[WireDtype, Checked(check_wire_dtype, "float32 or float16")] = "float32"
    model: Annotated[str, Text()] = ""

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def n_ids(self) -> int:
        """Tokens and support ids of all sequences."""
        return self.n_tokens + sum(sequence.n_scored * sequence.n_support for sequence in self.sequences)


@dataclass(frozen=True)
class ScoreReply(Message, kind="score_reply", route="worker -> proxy -> client"):
    """Reply to ``Score``.

    Attributes:
        request_id: Id of the request.
        scored: Results in the order of the request. The arrays of a received reply are views of its frames.
            ``topk_logps_TK`` has the dtype of the wire. A sender must not change arrays after it has encoded them.
    """

    request_id: RequestId
    scored: Annotated[Sequence[ScoredSequence], Scores()]


@dataclass(frozen=True)
class Cancel(Message, kind="cancel", route="client -> proxy -> worker"):
    """Notice that the result of a request is no longer needed."""

    request_id: RequestId


@dataclass(frozen=True)
class RetryLater(Message, kind="retry_later", route="proxy -> client"):
    """Rejection of a request by a proxy that is full or draining. The client sends the request again later."""

    request_id: RequestId
    reason: Reason


@dataclass(frozen=True)
class SetAsleep(Message, kind="set_asleep", route="client -> proxy -> all workers"):
    """Request to release the memory of all devices (sleep), or to restore and verify the model (wake up).

    Attributes:
        request_id: Id chosen by the sender. The proxy sends workers its own request.
        timeout_s: Remaining time until the deadline, in seconds.
        asleep: True to sleep, False to wake up.
    """

    request_id: RequestId
    timeout_s: Timeout
    asleep: Boolean


@dataclass(frozen=True)
class AsleepSet(Message, kind="asleep_set", route="worker -> proxy -> client"):
    """Reply to ``SetAsleep`` after all workers, or this worker, have the requested state.

    Attributes:
        request_id: Id of the request.
        asleep: State of the workers.
        n_workers: Number of workers.
    """

    request_id: RequestId
    asleep: Boolean
    n_workers: Annotated[int, Integer(0, MAX_COUNT)]


@dataclass(frozen=True)
class Failure(Message, kind="error", route="worker -> proxy -> client, receiver -> sender of an invalid message"):
    """Error of one request. With request id 0: refusal of a worker's registration."""

    request_id: RequestId
    error: Annotated[TeacherError, ErrorFields()]


@dataclass(frozen=True)
class Ready(Message, kind="ready", route="worker -> proxy"):
    """Registration of a worker, sent after its model is loaded.

    Attributes:
        info: Model of the worker.
        capacity_tokens: Tokens that the worker accepts at a time.
        name: Host and pid, for logs and the status.
        stall_timeout_s: Time limit of an engine step, in seconds, after which the worker ends itself; 0 for no limit.
        has_sleep_mode: True if the worker can sleep.
        is_asleep: True if it sleeps, from before a lost connection.
    """

    info: Annotated[ModelInfo, Record(ModelInfo)]
    capacity_tokens: Capacity
    name: Annotated[str, Text(kept_chars=_MAX_WORKER_NAME_CHARS)]
    stall_timeout_s: Annotated[float, Number(-1, LIMITS.stall_timeout_s)]
    has_sleep_mode: Boolean = False
    is_asleep: Boolean = False


@dataclass(frozen=True)
class Welcome(Message, kind="welcome", route="proxy -> worker"):
    """Confirmation of a registration."""


@dataclass(frozen=True)
class Heartbeat(Message, kind="heartbeat", route="worker -> proxy"):
    """Progress of a worker since its start, sent between engine steps and at least once per heartbeat interval.

    Attributes:
        n_steps: Engine steps.
        n_sequences: Scored sequences.
        n_tokens: Scored tokens.
        busy_s: Time in engine steps, in seconds.
    """

    n_steps: Total
    n_sequences: Total
    n_tokens: Total
    busy_s: Annotated[float, Number(-1, MAX_COUNT)]


@dataclass(frozen=True)
class Reregister(Message, kind="reregister", route="proxy -> worker"):
    """Notice to a worker that it is not registered. The worker drops its requests and sends ``Ready``."""


@dataclass(frozen=True)
class Probe(Message, kind="probe", route="proxy -> client or worker"):
    """Message without content. Sending it shows if the connection still exists. It has no reply."""


@dataclass(frozen=True)
class Goodbye(Message, kind="goodbye", route="worker -> proxy"):
    """Departure of a worker.

    Attributes:
        reason: Cause, for logs.
        broken: True if the engine failed, possibly because of a request; False if the worker was stopped.
    """

    reason: Reason
    broken: Boolean = False
