"""What is said between client, proxy and workers, within which limits; `protocol` turns it into bytes and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from teacher.errors import TeacherError, TeacherRequestError
from teacher.records import ModelInfo, TeacherAnswer, TeacherInfo, TeacherSequence

# Peers of another version refuse each other: one that overlooked a field would answer another question than was asked.
PROTOCOL_VERSION = 3


@dataclass(frozen=True)
class Limits:
    """Bounds of one message. They bound memory, not usefulness: no sane request comes near them."""

    header_bytes: int = 4 << 20
    text_chars: int = 16 << 10
    sequences: int = 4096
    sequence_tokens: int = 1 << 20
    request_tokens: int = 16 << 20
    vocab_size: int = 1 << 24
    eos_token_ids: int = 256
    request_frame_bytes: int = 4 << 20  # the largest legal request frame: one sequence, or the header
    answer_frame_bytes: int = 16 << 30  # 1M tokens x top-4096, or 16k tokens x a whole vocabulary of 256k
    timeout_s: float = 7 * 24 * 3600.0
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
    SCORE = "score"  # client -> proxy -> worker
    ANSWER = "answer"  # worker -> proxy -> client
    ERROR = "error"  # anybody -> whoever asked
    READY = "ready"  # worker -> proxy: my model is loaded
    WELCOME = "welcome"  # proxy -> worker: registered
    PROBE = "probe"  # proxy -> worker: no answer wanted, sending it shows whether there is still a connection
    BYE = "bye"  # worker -> proxy: I leave


@dataclass(frozen=True)
class Hello:
    request_id: int
    timeout_s: float


@dataclass(frozen=True)
class Info:
    request_id: int
    info: TeacherInfo


@dataclass(frozen=True)
class Score:
    request_id: int
    timeout_s: float
    sequences: list[TeacherSequence]
    temperature: float

    @property
    def n_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True)
class Answer:
    request_id: int
    answers: list[TeacherAnswer]


@dataclass(frozen=True)
class Failure:
    request_id: int
    error: TeacherError


@dataclass(frozen=True)
class Ready:
    info: ModelInfo
    capacity_tokens: int


@dataclass(frozen=True)
class Welcome:
    pass


@dataclass(frozen=True)
class Probe:
    pass


@dataclass(frozen=True)
class Bye:
    reason: str


Message = Hello | Info | Score | Answer | Failure | Ready | Welcome | Probe | Bye

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
                f"sequence {i}: expected 1 <= prompt_len < number of tokens, got prompt_len={sequence.prompt_len!r} "
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
