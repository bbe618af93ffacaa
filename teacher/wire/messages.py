"""Messages between client, proxy and workers, and their limits. ``protocol`` encodes and decodes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from teacher.errors import TeacherError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus

PROTOCOL_VERSION = 9
"""Peers of different versions refuse each other. A peer that ignores a field would return scores of another request."""

WireDtype = Literal["float32", "float16"]
"""Dtype of top-k log-probabilities on the wire."""


@dataclass(frozen=True)
class Limits:
    """Limits of one message. They bound memory and are far above every useful request.

    Attributes:
        header_bytes: Size of an encoded header. A request of 4096 sequences needs 200 kB. A small msgpack item, such as
            an empty list of one byte, takes 64 times its size in memory after decoding.
        text_chars: Length of one text field.
        list_texts: Texts of one list, such as the further lines of an error. The header of an error with the longest
            texts of four bytes per character has 400 kB.
        list_text_chars: Length of one text of a list.
        status_bytes: Size of an encoded service status.
        sequences: Sequences of one request.
        sequence_tokens: Tokens of one sequence.
        request_tokens: Tokens of one request.
        vocab_size: Vocabulary size, and size of each array dimension.
        eos_token_ids: End-of-sequence tokens of one model.
        last_tokens: Last tokens of one tokenizer, each of at most 1024 characters.
        request_frame_bytes: Size of a frame sent to a worker: the token ids of one sequence.
        reply_frame_bytes: Size of a frame sent to a client: 1M tokens with top-4096, or 16k tokens with the whole
            vocabulary of 256k tokens.
        timeout_s: Deadline of a request, in seconds.
        stall_timeout_s: Time limit of an engine step, in seconds.
        min_temperature: Lowest temperature. Below it a distribution is one token, and scaled logits may overflow fp32.
        max_temperature: Highest temperature. Above it a distribution is uniform.
    """

    header_bytes: int = 512 << 10
    text_chars: int = 16 << 10
    list_texts: int = 16
    list_text_chars: int = 1024
    status_bytes: int = 1 << 20
    sequences: int = 4096
    sequence_tokens: int = 1 << 20
    request_tokens: int = 16 << 20
    vocab_size: int = 1 << 24
    eos_token_ids: int = 256
    last_tokens: int = 1024
    request_frame_bytes: int = 4 << 20
    reply_frame_bytes: int = 16 << 30
    timeout_s: float = 7 * 24 * 3600.0
    stall_timeout_s: float = 1e6
    min_temperature: float = 1e-6
    max_temperature: float = 1e6

    @property
    def frames(self) -> int:
        """Frames of one message: the header, and at most three arrays for each sequence."""
        return 1 + 3 * self.sequences


LIMITS = Limits()


class Kind(StrEnum):
    """Message kinds with their values on the wire. A changed value requires a new ``PROTOCOL_VERSION``."""

    HELLO = "hello"  # client -> proxy
    INFO = "info"  # proxy -> client
    STATUS_REQUEST = "status_request"  # client -> proxy
    STATUS = "status"  # proxy -> client
    SCORE = "score"  # client -> proxy -> worker
    SCORE_REPLY = "score_reply"  # worker -> proxy -> client
    CANCEL = "cancel"  # client -> proxy -> worker
    RETRY_LATER = "retry_later"  # proxy -> client
    ERROR = "error"  # worker -> proxy -> client, and proxy or worker -> sender of an invalid message
    SET_ASLEEP = "set_asleep"  # client -> proxy -> all workers
    ASLEEP_SET = "asleep_set"  # worker -> proxy -> client
    READY = "ready"  # worker -> proxy
    WELCOME = "welcome"  # proxy -> worker
    HEARTBEAT = "heartbeat"  # worker -> proxy
    REREGISTER = "reregister"  # proxy -> worker
    PROBE = "probe"  # proxy -> client or worker
    GOODBYE = "goodbye"  # worker -> proxy


@dataclass(frozen=True)
class Hello:
    """Request for the ``TeacherInfo`` of a service. The proxy replies when it has a worker, or at the deadline."""

    request_id: int
    timeout_s: float


@dataclass(frozen=True)
class Info:
    """Reply to ``Hello``."""

    request_id: int
    info: TeacherInfo


@dataclass(frozen=True)
class StatusRequest:
    """Request for the ``ServiceStatus`` of a service."""

    request_id: int
    timeout_s: float


@dataclass(frozen=True)
class Status:
    """Reply to ``StatusRequest``."""

    request_id: int
    status: ServiceStatus


@dataclass(frozen=True)
class Score:
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

    request_id: int
    timeout_s: float
    sequences: list[TeacherSequence]
    logits: LogitSettings
    top_k: int
    wire_dtype: WireDtype
    model: str

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences, prompts included."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True)
class ScoreReply:
    """Reply to ``Score``.

    Attributes:
        request_id: Id of the request.
        scored: Results in the order of the request. The arrays are views of the received frames. ``topk_logps_TK`` has
            the dtype of the wire.
    """

    request_id: int
    scored: list[ScoredSequence]


@dataclass(frozen=True)
class Cancel:
    """Notice that the result of a request is no longer needed."""

    request_id: int


@dataclass(frozen=True)
class RetryLater:
    """Rejection of a request by a proxy that is full or draining. The client sends the request again later."""

    request_id: int
    reason: str


@dataclass(frozen=True)
class SetAsleep:
    """Request to release the memory of all devices (sleep), or to restore and verify the model (wake up).

    Attributes:
        request_id: Id chosen by the sender. The proxy sends workers a request of its own.
        timeout_s: Remaining time until the deadline, in seconds.
        asleep: True to sleep, False to wake up.
    """

    request_id: int
    timeout_s: float
    asleep: bool


@dataclass(frozen=True)
class AsleepSet:
    """Reply to ``SetAsleep`` after all workers, or this worker, have the requested state.

    Attributes:
        request_id: Id of the request.
        asleep: State of the workers.
        n_workers: Number of workers.
    """

    request_id: int
    asleep: bool
    n_workers: int


@dataclass(frozen=True)
class Failure:
    """Error of one request. With request id 0: refusal of a worker's registration."""

    request_id: int
    error: TeacherError


@dataclass(frozen=True)
class Ready:
    """Registration of a worker, sent after its model is loaded.

    Attributes:
        info: Model of the worker.
        capacity_tokens: Tokens that the worker accepts at a time.
        name: Host and pid, for logs and the status.
        stall_timeout_s: Time limit of an engine step, in seconds, after which the worker ends itself; 0 for no limit.
        has_sleep_mode: True if the worker can sleep.
        is_asleep: True if it sleeps, from before a lost connection.
    """

    info: ModelInfo
    capacity_tokens: int
    name: str
    stall_timeout_s: float
    has_sleep_mode: bool = False
    is_asleep: bool = False


@dataclass(frozen=True)
class Welcome:
    """Confirmation of a registration."""


@dataclass(frozen=True)
class Heartbeat:
    """Progress of a worker since its start, sent between engine steps and at least once per heartbeat interval.

    Attributes:
        n_steps: Engine steps.
        n_sequences: Scored sequences.
        n_tokens: Scored tokens.
        busy_s: Time in engine steps, in seconds.
    """

    n_steps: int
    n_sequences: int
    n_tokens: int
    busy_s: float


@dataclass(frozen=True)
class Reregister:
    """Notice to a worker that it is not registered. The worker drops its requests and sends ``Ready``."""


@dataclass(frozen=True)
class Probe:
    """Message without content. Sending it shows if the connection still exists. It has no reply."""


@dataclass(frozen=True)
class Goodbye:
    """Departure of a worker.

    Attributes:
        reason: Cause, for logs.
        broken: True if the engine failed, possibly because of a request; False if the worker was stopped.
    """

    reason: str
    broken: bool


Message = (
    Hello
    | Info
    | StatusRequest
    | Status
    | Score
    | ScoreReply
    | Cancel
    | RetryLater
    | SetAsleep
    | AsleepSet
    | Failure
    | Ready
    | Welcome
    | Heartbeat
    | Reregister
    | Probe
    | Goodbye
)
