"""Property tests of decoding: arbitrary bytes give a message or TeacherProtocolError, in bounded time and memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from teacher.errors import TeacherProtocolError, TeacherTimeout
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.wire import protocol
from teacher.wire.limits import LIMITS
from teacher.wire.messages import (
    MESSAGES,
    AsleepSet,
    Cancel,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    Info,
    Message,
    Probe,
    Ready,
    Reregister,
    RetryLater,
    Score,
    ScoreReply,
    SetAsleep,
    Status,
    StatusRequest,
    Welcome,
)
from tests._support.teacher_status import STATUS

# Derandomized, so that every machine tests the same examples. `decode_safely` bounds the time.
FUZZ = settings(derandomize=True, max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))

TIME_LIMIT_S = 2.0
SPARE_BYTES = 256 << 10


def allowed_bytes(n_bytes: int) -> int:
    """Return the memory that decoding a message of `n_bytes` may allocate.

    An empty list is one byte of msgpack, and 64 bytes in Python with its entry in the outer list. msgpack allocates a
    list with its announced length before it reads the items, for each of at most 512 nesting levels.
    """
    preallocated_list_bytes = 8 * min(512, n_bytes // 3) * min(n_bytes, LIMITS.frames)
    return SPARE_BYTES + 100 * n_bytes + preallocated_list_bytes


MODEL: dict[str, Any] = dict(
    model_name="m",
    vocab_size=9,
    n_tokens=8,
    tokenizer_fingerprint="f",
    max_model_len=8,
    n_logprobs=3,
    engine="e",
    eos_token_ids=(1, 7),
)


def valid_messages() -> dict[str, list[bytes]]:
    sequences = [TeacherSequence(np.arange(n, dtype=np.int32), p) for n, p in ((5, 2), (2, 1))]
    answer = ScoredSequence(np.zeros((3, 2), np.float32), np.ones((3, 2), np.int32), np.zeros(3, np.float32))
    messages = [
        Hello(1, 2.0),
        Info(1, TeacherInfo(**MODEL, protocol_version=1, n_workers=2)),
        StatusRequest(1, 2.0),
        Status(1, STATUS),
        Score(1, 2.0, sequences, LogitSettings(0.7, 9), top_k=2, wire_dtype="float16"),
        ScoreReply(1, [answer.reduced(0, "float16")] * 2),
        Cancel(1),
        RetryLater(1, "full"),
        Failure(
            1,
            TeacherTimeout("late", remedy="wait", stage="changing", workers=("a", "b"), details=("more",), sequence=1),
        ),
        SetAsleep(1, 2.0, asleep=True),
        AsleepSet(1, asleep=True, n_workers=2),
        Ready(ModelInfo(**MODEL), 100, "host:7", 60.0),
        Welcome(),
        Heartbeat(1, 2, 3, 4.0),
        Reregister(),
        Probe(),
        Goodbye("done", broken=True),
    ]
    return {message.kind: [bytes(frame) for frame in protocol.encode(message)] for message in messages}


VALID = valid_messages()


def decode_safely(frames: list[bytes]) -> Message | None:
    """Decode a message within the bounds of time and memory. Return None if it is refused."""
    n_bytes = sum(len(frame) for frame in frames)
    began = time.perf_counter()
    tracemalloc.start()
    try:
        protocol.peek_request_id(frames)
        message = protocol.decode(frames)
    except TeacherProtocolError as error:
        message = None
        assert len(str(error)) < 2000, "the error message contains the invalid value"
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < allowed_bytes(n_bytes), f"{n_bytes} bytes made decode allocate {peak_bytes}"
    assert time.perf_counter() - began < TIME_LIMIT_S
    assert message is None or isinstance(message, Message)
    return message


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 2**64 - 1, LIMITS.vocab_size, LIMITS.frames + 1])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
    max_leaves=30,
)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_valid_messages_cover_every_kind() -> None:
    assert set(VALID) == set(MESSAGES)
    assert all(decode_safely(frames) is not None for frames in VALID.values())


@FUZZ
@given(st.lists(st.binary(max_size=300), max_size=6))
@example([])
@example([b"\x91" * 1000])
@example([b"\xdd\x00\x00\x30\x00" * 50])
def test_decode_arbitrary_frames_is_refused(frames: list[bytes]) -> None:
    assert decode_safely(frames) is None


@FUZZ
@given(values, st.lists(st.binary(max_size=50), max_size=3))
def test_decode_arbitrary_header_is_refused(header: Any, frames: list[bytes]) -> None:
    assert decode_safely([msgpack.packb(header), *frames]) is None


@FUZZ
@given(st.data())
def test_decode_changed_header_values_is_safe(data: st.DataObject) -> None:
    first, *frames = VALID[data.draw(st.sampled_from(sorted(VALID)))]
    header = msgpack.unpackb(first)
    for key in data.draw(st.lists(st.sampled_from(sorted(header)), min_size=1, max_size=3, unique=True)):
        if isinstance(header[key], list) and header[key] and data.draw(st.booleans()):
            header[key][data.draw(st.integers(0, len(header[key]) - 1))] = data.draw(values)
        elif isinstance(header[key], dict) and data.draw(st.booleans()):
            header[key][data.draw(st.sampled_from(sorted(header[key])))] = data.draw(values)
        else:
            header[key] = data.draw(values)
    decode_safely([msgpack.packb(header), *frames])


@FUZZ
@given(st.data())
def test_decode_damaged_frames_is_safe(data: st.DataObject) -> None:
    frames = list(VALID[data.draw(st.sampled_from(sorted(VALID)))])
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(frames) - 1))
        what = data.draw(st.sampled_from(["cut", "drop", "double", "swap", "extend", "byte"]))
        if what == "cut":
            frames[i] = frames[i][: data.draw(st.integers(0, len(frames[i])))]
        elif what == "drop":
            frames = frames[:i] + frames[i + 1 :] or [b""]
        elif what == "double":
            frames.insert(i, frames[i])
        elif what == "swap":
            frames[0], frames[i] = frames[i], frames[0]
        elif what == "extend":
            frames[i] += data.draw(st.binary(max_size=20))
        elif frames[i]:
            at = data.draw(st.integers(0, len(frames[i]) - 1))
            frames[i] = frames[i][:at] + data.draw(st.binary(min_size=1, max_size=1)) + frames[i][at + 1 :]
    decode_safely(frames)


@FUZZ
@given(st.data())
def test_decode_changed_status_is_safe(data: st.DataObject) -> None:
    content: Any = STATUS.to_dict()
    key = data.draw(st.sampled_from(sorted(content)))
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=10,
    )
    content[key] = data.draw(json_values)
    decode_safely(with_status(json.dumps(content).encode()))


def with_status(text: bytes) -> list[bytes]:
    header = msgpack.unpackb(VALID["status"][0]) | {"arrays": [["u1", len(text)]]}
    return [msgpack.packb(header), text]


@pytest.mark.parametrize("depth", [100, 400, 500, 510, 600, 900, 940, 960, 980, 990, 1000, 100_000])
def test_decode_nested_values_is_refused(depth: int) -> None:
    assert decode_safely(with_status(b"[" * depth + b"]" * depth)) is None
    content = json.dumps(STATUS.to_dict()).encode()
    deep = content.replace(b'"queue_tokens": 1100', b'"queue_tokens": ' + b"[" * depth + b"]" * depth)
    assert deep != content and decode_safely(with_status(deep)) is None
    if depth < 600:
        for kind, key in (("score", "prompt_lens"), ("score", "temperature"), ("ready", "info"), ("hello", "v")):
            header = msgpack.unpackb(VALID[kind][0]) | {key: nested(depth)}
            assert decode_safely([msgpack.packb(header), *VALID[kind][1:]]) is None


@pytest.mark.parametrize("depth", [400, 800, 900, 940, 980, 1000, 1020])
def test_decode_nested_element_of_a_list_is_refused(depth: int) -> None:
    """The text of the error has the element. A proxy that could not write it ended."""
    header = msgpack.unpackb(VALID["score"][0])
    packed = msgpack.packb(header | {"prompt_lens": ["here", *header["prompt_lens"][1:]]})
    nested_element = packed.replace(msgpack.packb("here"), b"\x91" * depth + b"\xc0")
    assert nested_element != packed and decode_safely([nested_element, *VALID["score"][1:]]) is None


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xa0", b"\xcd\xff\xff", b"\xcb" + 8 * b"\x41"])
def test_decode_largest_header_allocates_below_64_mib(item: bytes) -> None:
    """The header contains as many arrays of the largest length as its size allows."""
    row = b"\xdc\x2f\xff" + 0x2FFF * item
    assert len(row) < LIMITS.header_bytes
    n_rows = (LIMITS.header_bytes - 16) // len(row)
    header = b"\x81\xa1a\xdc" + n_rows.to_bytes(2, "big") + n_rows * row
    assert min(peak_bytes_of_refusal(header) for _ in range(2)) < 64 << 20  # another thread may allocate meanwhile


def peak_bytes_of_refusal(header: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(TeacherProtocolError):
            protocol.decode([header])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_decode_error_message_is_short() -> None:
    long = [1] * LIMITS.frames
    for key in ("id", "timeout_s", "prompt_lens", "temperature", "wire_dtype", "top_k", "arrays", "kind", "v"):
        for value in (long, [long, long], "x" * 10_000):
            header = msgpack.unpackb(VALID["score"][0]) | {key: value}
            assert decode_safely([msgpack.packb(header), *VALID["score"][1:]]) is None
