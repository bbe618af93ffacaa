"""Strategies of valid messages, derived from the declarations in ``teacher.wire``: a new message needs no edit here."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from teacher.errors import TeacherError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.error_fields import ERROR_OF_CODE, ErrorFields, fields_of
from teacher.wire.fields import Checked, Flag, Integer, ListOf, Number, Record, Text, WireType, wire_types
from teacher.wire.limits import LIMITS
from teacher.wire.messages import MESSAGES, REQUEST_ID, Message, Ready
from teacher.wire.payloads import Scores, Sequences, Settings, StatusText

OPEN_ID = 1
"""Request id of half of the messages. A test can replace it by the id of an open request."""
K = 4
MODEL = ModelInfo(
    "model",
    vocab_size=128,
    n_tokens=100,
    tokenizer_fingerprint="sha256:0123",
    max_model_len=64,
    n_logprobs=K,
    engine="prepared",
    eos_token_ids=(1, 7),
)
SEQUENCES = [TeacherSequence(np.arange(n, dtype=np.int32), p) for n, p in ((5, 2), (2, 1))]
"""A request that ``MODEL`` can score."""
READY = Ready(MODEL, 1000, "host:7", 0.0, has_sleep_mode=True)


def messages(*kinds: type[Message]) -> SearchStrategy[Message]:
    """Return valid messages of some kinds, all kinds by default."""
    return st.one_of([_dataclass(kind) for kind in kinds or MESSAGES.values()])


def kinds(role: str, *, sent: bool) -> list[type[Message]]:
    """Return the kinds of messages that a role (``client``, ``worker``) sends, or receives."""
    found = []
    for kind in MESSAGES.values():
        for hops in kind.route.replace("receiver -> sender", "proxy -> client or worker").split(", "):
            sender, _, receivers = hops.partition(" -> ")
            if role in (sender if sent else receivers):
                found.append(kind)
    return found


def scores(sequences: list[TeacherSequence], k: int = K) -> list[ScoredSequence]:
    """Return scores with the shapes of these sequences."""
    found = []
    for sequence in sequences:
        shape = sequence.n_scored, k if sequence.with_top_k else 0
        support_TJ = np.zeros((sequence.n_scored, sequence.n_support), np.float32) if sequence.n_support else None
        found.append(
            ScoredSequence(
                np.zeros(shape, np.float32), np.ones(shape, np.int32), np.zeros(shape[:1], np.float32), support_TJ
            )
        )
    return found


def _dataclass(record: type) -> SearchStrategy[Any]:
    """Return objects of a dataclass with annotated fields. Fields with a default have it in half of them."""
    hints = get_type_hints(record)
    strategies = {name: _values(wire_type, hints[name]) for name, wire_type in wire_types(record).items()}
    for field in fields(record):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is not MISSING:
            strategies[field.name] = st.just(default) | strategies[field.name]
    return st.builds(record, **strategies)


def _values(wire_type: WireType, hint: Any = None) -> SearchStrategy[Any]:
    """Return valid values of a field. ``hint`` is its type for a checker."""
    match wire_type:
        case Integer(low, high):
            ids = st.just(OPEN_ID) if wire_type is REQUEST_ID else st.nothing()
            return ids | st.integers(low, high)
        case Number(low, high):
            return st.floats(low, high, exclude_min=True)
        case Flag():
            return st.booleans()
        case Text(max_chars):
            return st.text(max_size=min(max_chars, 20))
        case ListOf(item, max_items):
            return st.lists(_values(item), max_size=min(max_items, 3)).map(tuple)
        case Record(record):
            return _dataclass(record)
        case Checked():
            return st.from_type(hint)
        case Settings():
            temperatures = st.floats(LIMITS.min_temperature, LIMITS.max_temperature)
            return st.builds(LogitSettings, temperatures, st.integers(0, LIMITS.vocab_size))
        case Sequences():
            return st.just(SEQUENCES) | st.lists(_sequences(), min_size=1, max_size=3)
        case Scores():
            requests = st.sampled_from([SEQUENCES, SEQUENCES[:1]]) | st.lists(_sequences(), min_size=1, max_size=3)
            scored = st.builds(scores, requests, st.just(K) | st.integers(1, 8))
            return st.builds(lambda many, dtype: [one.reduced(0, dtype) for one in many], scored, _WIRE_DTYPES)
        case StatusText():
            return _dataclass(ServiceStatus)
        case ErrorFields():
            return st.one_of([_errors(kind) for kind in ERROR_OF_CODE.values()])
    raise TypeError(f"add a strategy of {type(wire_type).__name__}")


_WIRE_DTYPES = st.sampled_from(["float32", "float16"])


def _sequences() -> SearchStrategy[TeacherSequence]:
    ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=6)
    return ids.flatmap(
        lambda ids: st.builds(
            _sequence, st.just(ids), st.integers(1, len(ids) - 1), st.integers(0, 3), st.booleans(), st.integers(0, 63)
        )
    )


def _sequence(ids: list[int], prompt_len: int, n_support: int, with_top_k: bool, scored_bits: int) -> TeacherSequence:
    ranges = [[i, i + 1] for i in range(prompt_len, len(ids)) if scored_bits >> i & 1] or None
    n_scored = len(ranges) if ranges else len(ids) - prompt_len
    if not n_support:
        return TeacherSequence(ids, prompt_len, scored_ranges=ranges)
    support_TJ = np.arange(-1, n_scored * n_support - 1, dtype=np.int32).reshape(-1, n_support)
    return TeacherSequence(ids, prompt_len, scored_ranges=ranges, support_ids_TJ=support_TJ, with_top_k=with_top_k)


def _errors(kind: type[TeacherError]) -> SearchStrategy[TeacherError]:
    return st.builds(kind, **{name: _values(wire_type) for name, wire_type in fields_of(kind).items()})
