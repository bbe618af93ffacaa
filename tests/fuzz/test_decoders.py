"""Decoding: any bytes give a valid message or ``TeacherProtocolError``, in bounded memory and time."""

from __future__ import annotations

import json
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from teacher.commands.table import format_status
from teacher.errors import TeacherProtocolError, TeacherRequestError
from teacher.records import ModelInfo, TeacherInfo, TeacherSequence
from teacher.wire import protocol, request_checks
from teacher.wire.fields import Content
from teacher.wire.frames import unpack_arrays, unpack_header
from teacher.wire.limits import LIMITS, PROTOCOL_VERSION
from teacher.wire.messages import MESSAGES, REQUEST_ID, Failure, Info, Message, Ready, Score, ScoreReply, Status
from tests._support.teacher_status import STATUS
from tests.fuzz import hostile
from tests.fuzz.hostile import Frames, changed, frames_of, header_of, nested, pack, with_text
from tests.fuzz.memory import Allocations
from tests.fuzz.messages import MODEL, READY, SEQUENCES, messages
from tests.fuzz.profile import examples

CPU_LIMIT_S = 2.0
"""CPU time of one message. The load of the machine does not change it."""
_MAX_ERROR_CHARS = 2000
_MAX_ID = 2**63 - 1
_WIRE_TYPES = [
    wire_type
    for message in MESSAGES.values()
    for wire_type in message.wire_types().values()
    if "arrays" not in wire_type.entries
]


def decode(frames: Frames) -> Message | None:
    """Decode a message within the bounds of memory and time. Return None if it is refused."""
    began_s, message = time.thread_time(), None
    with Allocations().of(frames):
        try:
            protocol.peek_request_id(frames)
            message = protocol.decode(frames)
        except TeacherProtocolError as error:
            assert len(str(error)) < _MAX_ERROR_CHARS, "the error message contains the invalid value"
    assert time.thread_time() - began_s < CPU_LIMIT_S
    return message


def use(message: Message, frames: Frames) -> None:
    """Do what the receivers of a message do with its values. What they send must be valid."""
    match message:
        case Score():
            assert message.n_tokens > 0 and message.sequences
            assert isinstance(protocol.decode(protocol.readdress(frames, message.request_id, 1.0)), Score)
        case ScoreReply():
            protocol.readdress(frames, _MAX_ID)
            for scored in message.scored:
                scored.topk_logps_TK.astype(np.float32, copy=False)
        case Ready():
            use_model(TeacherInfo(**vars(message.info), protocol_version=PROTOCOL_VERSION, n_workers=1))
        case Info():
            use_model(message.info)
        case Status():
            format_status(message.status, "tcp://127.0.0.1:1")
            json.dumps(message.status.to_dict())
        case Failure():
            assert isinstance(protocol.decode(frames_of(Failure(1, message.error))), Failure)


def use_model(info: TeacherInfo) -> None:
    """Pass on the description of a model, and request scores of it."""
    info.shown()
    for message in Info(1, info), Score(1, 1.0, SEQUENCES, model=info.identity):
        assert isinstance(protocol.decode(frames_of(message)), type(message))


class TestMessages:
    """Messages are decoded, changed or not."""

    @pytest.mark.parametrize("kind", MESSAGES.values(), ids=MESSAGES)
    @examples(15)
    @given(data=st.data())
    def test_valid_message_is_decoded_without_a_loss(self, kind: type[Message], data: st.DataObject) -> None:
        frames = frames_of(data.draw(messages(kind)))
        received = decode(frames)
        assert received is not None and frames_of(received) == frames

    @pytest.mark.parametrize("kind", MESSAGES.values(), ids=MESSAGES)
    def test_changed_message_is_decoded_or_refused(self, kind: type[Message]) -> None:
        allocations = Allocations()

        @examples(40)
        @given(changed(messages(kind)))
        def check(frames: Frames) -> None:
            if (message := decode(frames)) is not None:
                use(message, frames)
            # Once more, when the caches of the interpreter are filled, and without a reference to the message.
            with allocations.of(frames), suppress(TeacherProtocolError):
                protocol.decode(frames)

        check()
        allocations.check_growth()

    @examples(60)
    @given(hostile.frames)
    @example([])
    @example([b"\x91" * 1000])
    @example([b"\xdd\x00\x00\x30\x00" * 50])
    def test_arbitrary_frames_are_refused(self, frames: Frames) -> None:
        assert decode(frames) is None

    @examples(80)
    @given(hostile.headers)
    def test_arbitrary_header_is_decoded_or_refused(self, frames: Frames) -> None:
        decode(frames)


class TestParts:
    """Parts of the decoders get what no other part has checked."""

    @examples(60)
    @given(changed(messages()))
    def test_wire_types_read_any_header(self, frames: Frames) -> None:
        with suppress(TeacherProtocolError):
            content = Content(unpack_header(frames[0]), []) if frames else Content({}, [])
            for wire_type in _WIRE_TYPES:
                for key in [*content.header, "missing"]:
                    with suppress(TeacherProtocolError):
                        wire_type.load(content, key)
            REQUEST_ID.load(content, "")

    @examples(100)
    @given(changed(messages(Score, ScoreReply, Status)))
    def test_arrays_have_the_size_of_their_frames(self, frames: Frames) -> None:
        with suppress(TeacherProtocolError):
            arrays = unpack_arrays(header_of(frames), frames[1:])
            assert [array.nbytes for array in arrays] == [len(frame) for frame in frames[1:]]

    @examples(60)
    @given(st.lists(st.sampled_from(hostile.SIZES), min_size=1, max_size=2), st.binary(max_size=40))
    def test_announced_size_is_not_allocated(self, shape: list[int], frame: bytes) -> None:
        with Allocations().of([frame]), suppress(TeacherProtocolError):
            unpack_arrays({"arrays": [["u1", *shape]]}, [frame])

    @examples(100)
    @given(hostile.values, hostile.frames)
    def test_request_checks_refuse_any_value_in_order(self, value: Any, frames: Frames) -> None:
        arrays = [np.frombuffer(frame[: len(frame) // 4 * 4], np.int32) for frame in frames]
        lens = value if isinstance(value, list) else [value] * len(arrays)
        sequences = [TeacherSequence(ids_N, n) for ids_N, n in zip(arrays, lens, strict=False)]
        for check in request_checks.check_temperature, request_checks.check_top_k, request_checks.check_wire_dtype:
            with suppress(TeacherRequestError):
                check(value)
        with suppress(TeacherRequestError):
            request_checks.check_sequences(sequences)


class TestNestedValues:
    """Nesting up to the limits of msgpack, JSON and the interpreter."""

    @pytest.mark.parametrize("depth", [100, 400, 500, 510, 600, 900, 940, 960, 980, 990, 1000, 100_000])
    def test_nested_value_is_refused(self, depth: int) -> None:
        status, deep = frames_of(Status(1, STATUS)), b"[" * depth + b"]" * depth
        assert decode(with_text(status, deep)) is None
        text = status[1].replace(b'"queue_tokens": 1100', b'"queue_tokens": ' + deep)
        assert text != status[1] and decode(with_text(status, text)) is None
        if depth < 600:
            score, ready = frames_of(Score(1, 1.0, SEQUENCES)), frames_of(READY)
            for frames, key in (score, "prompt_lens"), (score, "temperature"), (ready, "info"), (score, "v"):
                assert decode([pack(header_of(frames) | {key: nested(depth)}), *frames[1:]]) is None

    @pytest.mark.parametrize("depth", [400, 800, 900, 940, 980, 1000, 1020])
    def test_nested_element_of_a_list_is_refused(self, depth: int) -> None:
        """The text of the error has the element. A proxy that could not write it ended."""
        score = frames_of(Score(1, 1.0, SEQUENCES))
        packed = pack(header_of(score) | {"prompt_lens": ["here", 1]})
        nested_element = packed.replace(msgpack.packb("here"), b"\x91" * depth + b"\xc0")
        assert nested_element != packed and decode([nested_element, *score[1:]]) is None


class TestLimits:
    """Limits of memory and of error messages."""

    @pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xa0", b"\xcd\xff\xff", b"\xcb" + 8 * b"\x41"])
    def test_largest_header_allocates_below_64_mib(self, item: bytes) -> None:
        """The header contains as many arrays of the largest length as its size allows."""
        row = b"\xdc\x2f\xff" + 0x2FFF * item
        assert len(row) < LIMITS.header_bytes
        n_rows = (LIMITS.header_bytes - 16) // len(row)
        header = b"\x81\xa1a\xdc" + n_rows.to_bytes(2, "big") + n_rows * row
        assert peak_bytes_of_refusal(header) < 64 << 20

    @pytest.mark.parametrize(
        "key", ["id", "timeout_s", "prompt_lens", "temperature", "wire_dtype", "top_k", "arrays", "kind", "v"]
    )
    def test_error_message_is_short(self, key: str) -> None:
        score, long = frames_of(Score(1, 1.0, SEQUENCES)), [1] * LIMITS.frames
        for value in (long, [long, long], "x" * 10_000):
            assert decode([pack(header_of(score) | {key: value}), *score[1:]]) is None

    def test_longest_model_name_fits_into_a_request(self) -> None:
        info = ModelInfo(**vars(MODEL) | {"model_name": "\U0001f600" * 1024, "tokenizer_fingerprint": "x" * 1024})
        use_model(TeacherInfo(**vars(info), protocol_version=PROTOCOL_VERSION, n_workers=1))


def peak_bytes_of_refusal(header: bytes) -> int:
    """Return the memory that a refused header allocates."""
    tracemalloc.start()
    try:
        with pytest.raises(TeacherProtocolError):
            protocol.decode([header])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
