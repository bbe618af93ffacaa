"""What is said between client, proxy and workers, within which limits; `protocol` turns it into bytes and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

import numpy as np

from teacher.errors import TeacherError, TeacherRequestError
from teacher.records import ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus

# Peers of another version refuse each other: one that overlooked a field would answer another question than was asked.
PROTOCOL_VERSION = 5


@dataclass(frozen=True)
class Limits:
    """Bounds of one message. They bound memory, not usefulness: no sane request comes near them."""

    # 4096 sequences need 200 kB; and small things (an empty list is one byte) cost 64 times their size once decoded.
    header_bytes: int = 512 << 10
    text_chars: int = 16 << 10
    status_bytes: int = 1 << 20
    sequences: int = 4096
    sequence_tokens: int = 1 << 20
    request_tokens: int = 16 << 20
    vocab_size: int = 1 << 24
    eos_token_ids: int = 256
    request_frame_bytes: int = 4 << 20  # the largest legal request frame: one sequence
    answer_frame_bytes: int = 16 << 30  # 1M tokens x top-4096, or 16k tokens x a whole vocabulary of 256k
    timeout_s: float = 7 * 24 * 3600.0
    stall_timeout_s: float = 1e6
    # Beyond these a distribution is one token or uniform, and logits / temperature may leave fp32.
    min_temperature: float = 1e-6
    max_temperature: float = 1e6

    @property
    def frames(self) -> int:
        return 1 + 3 * self.sequences


LIMITS = Limits()


class Kind(StrEnum):
    HELLO = "hello"  # client -> proxy: who are you?
    INFO = "info"  # proxy -> client
    ASK_STATUS = "ask_status"  # client -> proxy: how are you?
    STATUS = "status"  # proxy -> client
    SCORE = "score"  # client -> proxy -> worker
    ANSWER = "answer"  # worker -> proxy -> client
    CANCEL = "cancel"  # client -> proxy -> worker: nobody waits for this request any more
    LATER = "later"  # proxy -> client: not now; keep the request and send it again
    ERROR = "error"  # anybody -> whoever asked
    READY = "ready"  # worker -> proxy: my model is loaded
    WELCOME = "welcome"  # proxy -> worker: registered
    PULSE = "pulse"  # worker -> proxy, between engine steps and at least every WORKER_HEARTBEAT.interval_s while idle
    REJOIN = "rejoin"  # proxy -> worker: I do not know you (any more); forget your requests and say READY
    PROBE = "probe"  # proxy -> anybody: no answer wanted, sending it shows whether there is still a connection
    BYE = "bye"  # worker -> proxy: I leave


# How top-k logprobs travel: 4 or 2 bytes each. Records have float32 either way.
WireDtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class Hello:
    request_id: int
    timeout_s: float


@dataclass(frozen=True)
class Info:
    request_id: int
    info: TeacherInfo


@dataclass(frozen=True)
class AskStatus:
    request_id: int
    timeout_s: float


@dataclass(frozen=True)
class Status:
    request_id: int
    status: ServiceStatus


@dataclass(frozen=True)
class Score:
    """`top_k`: how many of the teacher's `n_logprobs` are wanted, 0 for all.

    `model`: the `ModelInfo.identity` that it is meant for; empty for any.
    """

    request_id: int
    timeout_s: float
    sequences: list[TeacherSequence]
    temperature: float
    top_k: int
    wire_dtype: WireDtype
    model: str

    @property
    def n_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True)
class Answer:
    """Its arrays are views of the frames; `topk_logps_TK` has the dtype in which it traveled."""

    request_id: int
    answers: list[ScoredSequence]


@dataclass(frozen=True)
class Cancel:
    request_id: int


@dataclass(frozen=True)
class Later:
    request_id: int
    reason: str


@dataclass(frozen=True)
class Failure:
    request_id: int
    error: TeacherError


@dataclass(frozen=True)
class Ready:
    """Registration of a worker.

    Attributes:
        name: Host and pid, for people.
        stall_timeout_s: Time after which the worker ends itself if an engine step has not returned; 0: never.
    """

    info: ModelInfo
    capacity_tokens: int
    name: str
    stall_timeout_s: float


@dataclass(frozen=True)
class Welcome:
    pass


@dataclass(frozen=True)
class Pulse:
    """What the worker has done since it started; `busy_s` is the time in engine steps."""

    n_steps: int
    n_sequences: int
    n_tokens: int
    busy_s: float


@dataclass(frozen=True)
class Rejoin:
    pass


@dataclass(frozen=True)
class Probe:
    pass


@dataclass(frozen=True)
class Bye:
    """`broken`: the engine failed, perhaps through what it was given; else the worker was asked to end."""

    reason: str
    broken: bool


Message = (
    Hello
    | Info
    | AskStatus
    | Status
    | Score
    | Answer
    | Cancel
    | Later
    | Failure
    | Ready
    | Welcome
    | Pulse
    | Rejoin
    | Probe
    | Bye
)

_SPLIT_HINT = "ask for less at once: raise actor_rollout_ref.teacher.num_microbatches"


def check_sequences(sequences: Sequence[TeacherSequence]) -> None:
    """Raise TeacherRequestError unless `sequences` can be sent: count, dtype, shapes, lengths."""
    if not sequences:
        raise TeacherRequestError("a request has one sequence at least, got none")
    if len(sequences) > LIMITS.sequences:
        raise TeacherRequestError(
            f"{len(sequences)} sequences in one request, at most {LIMITS.sequences} can be sent; {_SPLIT_HINT}"
        )
    for i, sequence in enumerate(sequences):
        ids = sequence.token_ids
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise TeacherRequestError(
                f"sequence {i}: token_ids must be a numpy int32 array [N], got {got}; use np.asarray(ids, np.int32)"
            )
        if len(ids) > LIMITS.sequence_tokens:
            raise TeacherRequestError(f"sequence {i}: {len(ids)} tokens, at most {LIMITS.sequence_tokens} can be sent")
        if type(sequence.prompt_len) is not int or not 1 <= sequence.prompt_len < len(ids):
            raise TeacherRequestError(
                f"sequence {i}: expected 1 <= prompt_len < number of tokens, got "
                f"prompt_len={sequence.prompt_len!r:.40} "
                f"with {len(ids)} tokens; a prompt needs one token at least, and an empty response has nothing to score"
            )
    n_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    if n_tokens > LIMITS.request_tokens:
        raise TeacherRequestError(
            f"{n_tokens} tokens in one request, at most {LIMITS.request_tokens} can be sent; {_SPLIT_HINT}"
        )


def check_temperature(temperature: Any) -> float:
    """Raise TeacherRequestError unless `temperature` is a number within the limits."""
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if is_number and LIMITS.min_temperature <= temperature <= LIMITS.max_temperature:  # false for NaN
        return float(temperature)
    raise TeacherRequestError(
        f"temperature must be a number from {LIMITS.min_temperature:g} to {LIMITS.max_temperature:g}, "
        f"got {repr(temperature)[:40]}; correct gkd.distill_temperature"
    )


def check_top_k(top_k: Any) -> int:
    """0 for None. Raise TeacherRequestError unless `top_k` can be asked of some teacher."""
    if top_k is None:
        return 0
    if type(top_k) is int and 1 <= top_k <= LIMITS.vocab_size:
        return top_k
    raise TeacherRequestError(
        f"top_k must be 1 to {LIMITS.vocab_size}, or None for all that the teacher returns, got {top_k!r:.40}; correct "
        "actor_rollout_ref.teacher.top_k"
    )


def check_wire_dtype(wire_dtype: Any) -> WireDtype:
    """Raise TeacherRequestError unless `wire_dtype` is one."""
    for known in get_args(WireDtype):
        if wire_dtype == known:
            return known
    raise TeacherRequestError(
        f"wire_dtype must be float32 or float16, got {wire_dtype!r:.40}; correct actor_rollout_ref.teacher.wire_dtype"
    )
