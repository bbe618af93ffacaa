"""Wire format: round trips, and refusal of malformed messages without crashes or large allocations."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import fields
from typing import Annotated, Any, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest

from teacher import errors
from teacher.client.arguments import normalize_sequences
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.wire import protocol, request_checks
from teacher.wire.limits import LIMITS, PROTOCOL_VERSION, WireDtype
from teacher.wire.messages import MESSAGES, Failure, Goodbye, Hello, Info, Probe, Ready, Score, ScoreReply, Welcome
from tests._support.errors import raises
from tests._support.fake_worker import expected_scores
from tests._support.repository import REPO

MODEL: dict[str, Any] = dict(
    model_name="m",
    vocab_size=9,
    n_tokens=9,
    tokenizer_fingerprint="f",
    max_model_len=8,
    n_logprobs=3,
    engine="e",
    eos_token_ids=(1, 7),
)

LOGITS = LogitSettings(0.7, 9)
READY = Ready(ModelInfo(**MODEL), 100, "host:7", 60.0)


def sequences() -> list[TeacherSequence]:
    return [TeacherSequence(np.arange(n, dtype=np.int32), prompt_len) for n, prompt_len in ((5, 2), (2, 1), (7, 6))]


def scored() -> list[ScoredSequence]:
    rng = np.random.default_rng(0)
    return [
        ScoredSequence(
            rng.normal(size=(n, 3)).astype(np.float32),
            rng.integers(0, 9, (n, 3)).astype(np.int32),
            rng.normal(size=n).astype(np.float32),
        )
        for n in (3, 1)
    ]


def as_bytes(frames: list[protocol.Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def valid_messages() -> list[list[bytes]]:
    return [
        as_bytes(frames)
        for frames in (
            protocol.encode(Hello(1, 2.0)),
            protocol.encode(Info(1, TeacherInfo(**MODEL, protocol_version=1, n_workers=2))),
            protocol.encode(Score(1, 2.0, sequences(), LOGITS)),
            protocol.encode(ScoreReply(1, scored())),
            protocol.encode(Failure(1, errors.TeacherTimeout("late"))),
            protocol.encode(READY),
            protocol.encode(Welcome()),
            protocol.encode(Probe()),
            protocol.encode(Goodbye("done")),
        )
    ]


def with_header(frames: list[bytes], **changes: object) -> list[bytes]:
    return [msgpack.packb({**msgpack.unpackb(frames[0]), **changes}), *frames[1:]]


def test_score_round_trip_keeps_sequences() -> None:
    message = protocol.decode(as_bytes(protocol.encode(Score(7, 2.5, sequences(), LOGITS))))
    assert isinstance(message, Score)
    assert (message.request_id, message.timeout_s, message.n_tokens, message.logits) == (7, 2.5, 14, LOGITS)
    for got, sent in zip(message.sequences, sequences(), strict=True):
        np.testing.assert_array_equal(got.token_ids, sent.token_ids)
        assert got.token_ids.dtype == np.int32 and got.prompt_len == sent.prompt_len


def with_support() -> list[TeacherSequence]:
    """Return sequences without support ids, with them alone, and with both."""
    plain, alone, both = sequences()
    ids = {each: np.arange(2 * each.n_scored, dtype=np.int32).reshape(-1, 2) - 1 for each in (alone, both)}
    return [
        plain,
        TeacherSequence(alone.token_ids, alone.prompt_len, support_ids_TJ=ids[alone], with_top_k=False),
        TeacherSequence(both.token_ids, both.prompt_len, support_ids_TJ=ids[both]),
    ]


def conversations() -> list[TeacherSequence]:
    """Return sequences with scored ranges, without them, and with ranges and support ids."""
    ids_N = np.arange(9, dtype=np.int32)
    return [
        TeacherSequence(ids_N, 2, scored_ranges=[[2, 4], [5, 9]]),
        sequences()[0],
        TeacherSequence(ids_N, 2, scored_ranges=[[8, 9]], support_ids_TJ=[[3, 4]], with_top_k=False),
    ]


class TestScoredRanges:
    def test_ranges_select_the_scored_tokens(self) -> None:
        first, plain, last = conversations()
        assert first.scored_positions_T.tolist() == first.scored_ids_T.tolist() == [2, 3, 5, 6, 7, 8]
        assert (first.n_scored, first.first_scored, last.n_scored, last.first_scored) == (6, 2, 1, 8)
        np.testing.assert_array_equal(plain.scored_ids_T, plain.token_ids[plain.prompt_len :])
        assert plain.n_scored == len(plain.scored_positions_T)

    def test_request_round_trip_keeps_them(self) -> None:
        message = protocol.decode(as_bytes(protocol.encode(Score(7, 2.5, conversations()))))
        assert isinstance(message, Score)
        for got, sent in zip(message.sequences, conversations(), strict=True):
            np.testing.assert_array_equal(got.token_ids, sent.token_ids)
            np.testing.assert_array_equal(got.scored_positions_T, sent.scored_positions_T)
            assert (got.scored_ranges is None, got.n_support) == (sent.scored_ranges is None, sent.n_support)

    @pytest.mark.parametrize(
        "ranges",
        [
            np.zeros((0, 2), np.int32),
            np.array([[1, 3]], np.int32),
            np.array([[3, 10]], np.int32),
            np.array([[4, 4]], np.int32),
            np.array([[5, 6], [3, 4]], np.int32),
            np.array([[3, 6], [5, 7]], np.int32),
            np.array([[3, 2147483647], [-2147483000, 6]], np.int32),
            np.array([3, 6], np.int32),
            np.array([[3.0, 6.0]]),
            np.array([[3, 6]], np.int64),
            [[3, 6, 7]],
            [[3, 6], [7]],
        ],
    )
    def test_invalid_ranges_are_refused(self, ranges: Any) -> None:
        sequence = TeacherSequence(np.arange(9, dtype=np.int32), 2, scored_ranges=ranges)
        with raises(errors.TeacherRequestError, argument="scored_ranges", sequence=1):
            protocol.encode(Score(7, 2.5, [sequences()[0], sequence]))

    def test_client_converts_integers(self) -> None:
        sequence = TeacherSequence(np.arange(9, dtype=np.int32), 2, scored_ranges=np.array([[3, 6]], np.int64))
        [found] = normalize_sequences([sequence])
        assert found.scored_ranges is not None and found.scored_ranges.dtype == np.int32
        assert normalize_sequences([found])[0] is found

    def test_bounds_that_int32_does_not_have_are_refused(self) -> None:
        wide = np.array([[3 + 2**32, 5 + 2**32]])
        found = normalize_sequences([TeacherSequence(np.arange(9, dtype=np.int32), 2, scored_ranges=wide)])
        with raises(errors.TeacherRequestError, argument="scored_ranges"):
            protocol.encode(Score(7, 2.5, found))


class TestSupportIds:
    def test_request_round_trip_keeps_them(self) -> None:
        message = protocol.decode(as_bytes(protocol.encode(Score(7, 2.5, with_support()))))
        assert isinstance(message, Score)
        for got, sent in zip(message.sequences, with_support(), strict=True):
            np.testing.assert_array_equal(got.token_ids, sent.token_ids)
            assert (got.support_ids_TJ is None) == (sent.support_ids_TJ is None)
            if got.support_ids_TJ is not None:
                np.testing.assert_array_equal(got.support_ids_TJ, sent.support_ids_TJ)
            assert got.with_top_k is sent.with_top_k

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_reply_round_trip_keeps_them(self, dtype: WireDtype) -> None:
        sent = [expected_scores(each).reduced(2, dtype) for each in with_support()]
        message = protocol.decode(as_bytes(protocol.encode(ScoreReply(7, sent))))
        assert isinstance(message, ScoreReply)
        for got, want in zip(message.scored, sent, strict=True):
            np.testing.assert_array_equal(got.topk_ids_TK, want.topk_ids_TK)
            np.testing.assert_array_equal(got.topk_logps_TK, want.topk_logps_TK)
            assert (got.support_logps_TJ is None) == (want.support_logps_TJ is None)
            if got.support_logps_TJ is not None:
                np.testing.assert_array_equal(got.support_logps_TJ, want.support_logps_TJ)
                assert got.support_logps_TJ.dtype == dtype

    @pytest.mark.parametrize(
        ("support_ids_TJ", "with_top_k", "argument"),
        [
            (np.zeros((2, 3), np.int64), True, "support_ids_TJ"),
            (np.zeros((3, 3), np.int32), True, "support_ids_TJ"),
            (np.zeros((2, 0), np.int32), True, "support_ids_TJ"),
            (np.zeros(2, np.int32), True, "support_ids_TJ"),
            (np.full((2, 3), -2, np.int32), True, "support_ids_TJ"),
            (None, False, "with_top_k"),
            (np.zeros((2, 3), np.int32), 1, "with_top_k"),
        ],
    )
    def test_invalid_request_is_refused(self, support_ids_TJ: Any, with_top_k: Any, argument: str) -> None:
        sequence = TeacherSequence(
            np.arange(5, dtype=np.int32), 3, support_ids_TJ=support_ids_TJ, with_top_k=with_top_k
        )
        with raises(errors.TeacherRequestError, argument=argument, sequence=1):
            protocol.encode(Score(7, 2.5, [sequences()[0], sequence]))

    @pytest.mark.parametrize("with_top_k", [None, [True], [True, True, 1]])
    def test_invalid_flags_are_refused(self, with_top_k: Any) -> None:
        frames = as_bytes(protocol.encode(Score(7, 2.5, with_support())))
        with raises(errors.TeacherProtocolError, entry="with_top_k"):
            protocol.decode(with_header(frames, with_top_k=with_top_k))


def test_score_without_temperature_is_refused() -> None:
    frames = as_bytes(protocol.encode(Score(7, 2.5, sequences())))
    header = msgpack.unpackb(frames[0])
    assert header.pop("temperature") == 1.0
    with raises(errors.TeacherProtocolError, entry="temperature", sequence=None):
        protocol.decode([msgpack.packb(header), *frames[1:]])


def test_score_reply_round_trip_copies_nothing() -> None:
    frames = protocol.encode(ScoreReply(7, sent := scored()))
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), sent[0].topk_logps_TK)
    message = protocol.decode(frames)
    assert isinstance(message, ScoreReply) and message.request_id == 7
    for got, want in zip(message.scored, sent, strict=True):
        assert got.support_logps_TJ is want.support_logps_TJ is None
        for name in ("topk_logps_TK", "topk_ids_TK", "sampled_logps_T"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
            assert getattr(got, name).dtype == getattr(want, name).dtype
    assert np.shares_memory(message.scored[0].topk_logps_TK, sent[0].topk_logps_TK)


def test_small_messages_round_trip() -> None:
    hello, info, _, _, _, ready, welcome, probe, bye = (protocol.decode(frames) for frames in valid_messages())
    assert hello == Hello(1, 2.0)
    assert info == Info(1, TeacherInfo(**MODEL, protocol_version=1, n_workers=2))
    assert ready == READY
    assert (welcome, probe, bye) == (Welcome(), Probe(), Goodbye("done", broken=False))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (errors.TeacherChanged, {"options": ("CKPT_PATH",)}),
        (errors.TeacherTimeout, {"stage": "changing", "workers": ("host:1", "host:2")}),
        (errors.TeacherProtocolError, {"entry": "v", "peer_version": 99}),
        (errors.TeacherRequestError, {"sequence": 0, "argument": "token_ids", "n_losses": 3}),
        (errors.TeacherUnavailable, {"worker": "worker host:1"}),
        (errors.TeacherWithoutWorker, {}),
        (errors.TeacherAsleep, {"details": ("one", "two")}),
    ],
)
def test_errors_round_trip_wire_and_pickle(kind: type[errors.TeacherError], fields: dict[str, Any]) -> None:
    sent = kind("got x, expected y", remedy="do z", **fields)
    message = protocol.decode(protocol.encode(Failure(3, sent)))
    assert isinstance(message, Failure) and message.request_id == 3
    for error in (message.error, pickle.loads(pickle.dumps(message.error))):
        assert type(error) is kind and vars(error) == vars(sent)


def test_encode_error_sends_no_place_of_the_receiver_and_keeps_the_limits() -> None:
    long, medium = ("\N{MUSICAL SYMBOL G CLEF}" * 2 * n for n in (LIMITS.text_chars, LIMITS.list_text_chars))
    many = (medium,) * 2 * LIMITS.list_texts
    sent = errors.TeacherRequestError(
        long,
        remedy=long,
        argument=medium,
        worker=medium,
        details=many,
        workers=many,
        options=many,
        address="tcp://host:1",
        operation="hello",
        uid=7,
    )
    message = protocol.decode(as_bytes(protocol.encode(Failure(3, sent))))
    assert isinstance(message, Failure)
    error = message.error
    assert (error.address, error.operation, error.uid) == ("", "", None)
    assert len(error.what) == len(error.remedy) == LIMITS.text_chars
    assert {len(text) for text in error.details} == {LIMITS.list_text_chars}
    assert len(error.details) == len(error.workers) == LIMITS.list_texts


@pytest.mark.parametrize(
    ("data", "entry"),
    [
        (None, "error"),
        ({"what": 1}, "what"),
        ({"what": "x" * (LIMITS.text_chars + 1)}, "what"),
        ({"details": ["x"] * (LIMITS.list_texts + 1)}, "details"),
        ({"details": ["x" * (LIMITS.list_text_chars + 1)]}, "details"),
        ({"workers": [1]}, "workers"),
        ({"sequence": -1}, "sequence"),
        ({"sequence": LIMITS.sequences}, "sequence"),
        ({"n_losses": True}, "n_losses"),
        ({"stage": "of another class"}, "stage"),
        ({"address": "tcp://host:1"}, "address"),
    ],
)
def test_error_with_invalid_data_is_refused(data: object, entry: str) -> None:
    frames = as_bytes(protocol.encode(Failure(3, errors.TeacherRequestError("x"))))
    with raises(errors.TeacherProtocolError, entry=entry):
        protocol.decode(with_header(frames, error=data))


def test_error_of_another_version_is_read_from_its_text() -> None:
    sent = errors.TeacherRequestError("got x", remedy="do y", sequence=2)
    frames = with_header(as_bytes(protocol.encode(Failure(3, sent))), v=PROTOCOL_VERSION + 1, error=7, more="data")
    message = protocol.decode(frames)
    assert isinstance(message, Failure) and type(message.error) is errors.TeacherRequestError
    assert message.error.what == str(sent) and message.error.sequence is None


def test_readdress_changes_id_and_timeout_only() -> None:
    frames = protocol.encode(Score(7, 2.5, sequences(), LOGITS))
    message = protocol.decode(protocol.readdress(frames, 8, 1.5))
    assert isinstance(message, Score) and (message.request_id, message.timeout_s) == (8, 1.5)
    assert message.logits == LOGITS
    np.testing.assert_array_equal(message.sequences[0].token_ids, sequences()[0].token_ids)


def test_encode_score_copies_token_ids() -> None:
    mine = sequences()
    frames = protocol.encode(Score(1, 1.0, mine))
    mine[0].token_ids[:] = 77
    message = protocol.decode(frames)
    assert isinstance(message, Score) and message.sequences[0].token_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sequence", "argument"),
    [
        (TeacherSequence(np.zeros(3, np.int64), 1), "token_ids"),
        (TeacherSequence(np.zeros((3, 1), np.int32), 1), "token_ids"),
        (TeacherSequence([1.5, 2.0], 1), "token_ids"),  # type: ignore[list-item]
        (TeacherSequence(np.zeros(3, np.int32), 0), "prompt_len"),
        (TeacherSequence(np.zeros(3, np.int32), 3), "prompt_len"),
        (TeacherSequence(np.zeros(LIMITS.sequence_tokens + 1, np.int32), 3), "token_ids"),
    ],
)
def test_encode_score_invalid_sequence_is_refused(sequence: TeacherSequence, argument: str) -> None:
    with raises(errors.TeacherRequestError, sequence=1, argument=argument):
        protocol.encode(Score(1, 1.0, [sequences()[0], sequence]))


def test_check_sequences_large_batch_error_names_argument_and_key() -> None:
    short, long = (TeacherSequence(np.zeros(n, np.int32), 1) for n in (2, LIMITS.sequence_tokens))
    too_many, too_long = (
        [short] * (LIMITS.sequences + 1),
        [long] * (LIMITS.request_tokens // LIMITS.sequence_tokens + 1),
    )
    options = ("actor_rollout_ref.teacher.num_microbatches",)
    for batch, argument in ((too_many, "sequences"), (too_long, "token_ids")):
        with raises(errors.TeacherRequestError, argument=argument, sequence=None, options=options):
            request_checks.check_sequences(batch)


def test_other_version_is_refused_except_errors() -> None:
    for frames in valid_messages():
        other = with_header(frames, v=PROTOCOL_VERSION + 1)
        if msgpack.unpackb(frames[0])["kind"] == "error":
            assert isinstance(protocol.decode(other), Failure)
        else:
            with raises(errors.TeacherProtocolError, entry="v", peer_version=PROTOCOL_VERSION + 1):
                protocol.decode(other)
            assert protocol.peek_request_id(other) == msgpack.unpackb(frames[0])["id"]


def malformed_messages() -> list[list[bytes]]:
    return [*malformed_frames(), *malformed_score_headers(), *malformed_arrays(), *malformed_other_headers()]


def malformed_frames() -> list[list[bytes]]:
    score = valid_messages()[2]
    return [
        [],
        [b""],
        [b"\xdd\xff\xff\xff\xff"],  # an array of 4 G items
        [b"\xdf\xff\xff\xff\xff"],  # a map of 4 G items
        [b"\xdb\xff\xff\xff\xff"],  # a text of 4 GiB
        [b"\xc6\xff\xff\xff\xff"],  # 4 GiB of bytes
        [b"\xdd\x00\x40\x00\x00" * 600 + b"\x00" * (LIMITS.header_bytes - 3000)],  # nested, each with a plausible count
        [b"\x91" * 100_000],  # nested beyond any stack
        [b"\x00" * (LIMITS.header_bytes + 1)],
        [msgpack.packb({1: 2})],
        [msgpack.packb({"kind": "score", "extension": msgpack.ExtType(4, b"x" * 100)})],
        [msgpack.packb([1, 2, 3])],
        [b"\x80\x04\x95"],
        [pickle.dumps({"kind": "score"})],
        score[:-1],
        [*score, b"more"],
        score[:1] + [b""] * 3,
        [*score[:1]] * (LIMITS.frames + 5),
    ]


def malformed_score_headers() -> list[list[bytes]]:
    score, reply = valid_messages()[2:4]
    return [
        with_header(score, kind="nonsense"),
        with_header(score, kind=["score"]),
        with_header(score, id=-1),
        with_header(score, id=True),
        with_header(score, id="7"),
        with_header(score, timeout_s=0),
        with_header(score, timeout_s=float("nan")),
        with_header(score, timeout_s=float("inf")),
        with_header(score, timeout_s="1"),
        *(
            with_header(score, temperature=value)
            for value in (
                0,
                -1.0,
                1e-300,
                1e300,
                2**64 - 1,
                float("nan"),
                float("inf"),
                True,
                "1",
                None,
                [1.0],
                {"T": 1},
            )
        ),
        with_header(score, unknown_key=[1.0] * 1000),
        with_header(reply, timeout_s=1.0),
        with_header(score, prompt_lens=[1, 1]),
        with_header(score, prompt_lens=[5, 1, 1]),
        with_header(score, prompt_lens=[0, 1, 1]),
        with_header(score, prompt_lens=[2**63, 1, 1]),
        with_header(score, prompt_lens=[1.0, 1, 1]),
    ]


def malformed_arrays() -> list[list[bytes]]:
    score, reply = valid_messages()[2:4]
    return [
        with_header(score, arrays=None),
        with_header(score, arrays=[None] * 3),
        with_header(score, arrays=[["O", 5], ["i4", 2], ["i4", 7]]),
        with_header(score, arrays=[["i4", 2**62], ["i4", 2], ["i4", 7]]),
        with_header(score, arrays=[["i4", 2**31, 2**31], ["i4", 2], ["i4", 7]]),
        with_header(score, arrays=[["i4", -5], ["i4", 2], ["i4", 7]]),
        with_header(score, arrays=[["i4", 5, 1, 1], ["i4", 2], ["i4", 7]]),
        with_header(score, arrays=[["f4", 5], ["i4", 2], ["i4", 7]]),
        with_header(score, arrays=[["i4", 6], ["i4", 2], ["i4", 7]]),
        with_header(reply, arrays=[["f4", 9], ["i4", 3, 3], ["f4", 3], ["f4", 1, 3], ["i4", 1, 3], ["f4", 1]]),
        with_header(reply, arrays=[["i4", 3, 3], ["f4", 3, 3], ["f4", 3], ["f4", 1, 3], ["i4", 1, 3], ["f4", 1]]),
    ]


def malformed_other_headers() -> list[list[bytes]]:
    ids = np.zeros(4, np.int32).tobytes()
    return [
        with_header(valid_messages()[5], capacity_tokens=0),
        *(
            with_header(valid_messages()[5], stall_timeout_s=value)
            for value in (-1.0, 1e7, float("nan"), True, "1", None)
        ),
        with_header(valid_messages()[5], info={**MODEL, "vocab_size": "9"}),
        with_header(valid_messages()[5], info={**MODEL, "extra": 1}),
        with_header(valid_messages()[5], info={**MODEL, "model_name": "x" * 1025}),
        *(with_header(valid_messages()[5], info={**MODEL, key: 0}) for key in ("n_logprobs", "vocab_size", "n_tokens")),
        *(
            with_header(valid_messages()[5], info={**MODEL, "eos_token_ids": ids})
            for ids in (7, "7", [-1], [True], ["7"], [[7]], [2**62], [1] * (LIMITS.eos_token_ids + 1), {7: 7})
        ),
        with_header(valid_messages()[8], reason="x" * (LIMITS.text_chars + 1)),
        [*with_header(valid_messages()[0], arrays=[["i4", 4]]), ids],
    ]


def test_decode_malformed_message_is_refused_cheaply() -> None:
    for number, frames in enumerate(malformed_messages()):
        tracemalloc.start()
        try:
            with pytest.raises(errors.TeacherProtocolError):
                protocol.decode(frames)
            protocol.peek_request_id(frames)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 64 << 20, f"malformed message {number} allocated {peak_bytes} bytes"


def test_decode_damaged_message_raises_protocol_error_only() -> None:
    rng = np.random.default_rng(0)
    valid = valid_messages()
    for frames in valid:
        for cut in range(len(frames[0])):
            with pytest.raises(errors.TeacherProtocolError):
                protocol.decode([frames[0][:cut], *frames[1:]])
    n_refused = 0
    for _ in range(5000):
        frames = list(valid[rng.integers(len(valid))])
        i = rng.integers(len(frames))
        damaged = bytearray(frames[i])
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        frames[i] = bytes(damaged)
        try:
            protocol.decode(frames)
        except errors.TeacherProtocolError:
            n_refused += 1
        protocol.peek_request_id(frames)
    for _ in range(2000):
        frames = [rng.bytes(rng.integers(0, 200)) for _ in range(rng.integers(0, 5))]
        with pytest.raises(errors.TeacherProtocolError):
            protocol.decode(frames)
    assert n_refused > 500


def test_decode_long_worker_name_is_cut() -> None:
    """The status has the names of all workers, and its size is limited."""
    (ready,) = [frames for frames in valid_messages() if msgpack.unpackb(frames[0])["kind"] == "ready"]
    message = protocol.decode(with_header(ready, name="h" * 5000))
    assert isinstance(message, Ready) and message.name == "h" * 256


def test_every_field_of_a_message_declares_its_wire_type() -> None:
    for record in (*MESSAGES.values(), ModelInfo, TeacherInfo):
        hints = get_type_hints(record, include_extras=True)
        assert all(get_origin(hints[field.name]) is Annotated for field in fields(record)), record


def test_page_has_the_table_of_messages() -> None:
    printed = subprocess.run([sys.executable, "-m", "teacher.wire"], capture_output=True, text=True, check=True)
    assert printed.stdout.count("\n") == len(MESSAGES) + 2
    assert printed.stdout in (REPO / "docs/teacher_service.md").read_text(encoding="utf-8")


def test_page_has_the_frame_limits() -> None:
    text = " ".join((REPO / "docs/teacher_service.md").read_text().split())
    client, worker = LIMITS.request_frame_bytes >> 20, LIMITS.reply_frame_bytes >> 30
    assert f"single frame is too large ({client} MiB for a client, {worker} GiB for a worker)" in text
