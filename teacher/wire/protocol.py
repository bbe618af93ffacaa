"""Encoding and decoding of messages. This module opens no sockets.

A message is one msgpack header frame, followed by raw little-endian array frames::

    header = {"v": PROTOCOL_VERSION, "kind": "score", "id": 7, ..., "arrays": [["i4", 12], ["f4", 5, 64], ...]}
    frames = [msgpack(header), array 0, array 1, ...]

Arrays are ragged: one (request) or three (reply) per sequence, response positions only, without padding. Nothing is
unpickled. Every count, size and dtype is compared with ``LIMITS`` and with the received bytes before it is used, so an
invalid header causes an error but no large allocation. The entries ``v``, ``kind``, ``id``, ``code`` and ``message``
keep their meaning in every protocol version, so that the text of an error can always be decoded. The entry ``error`` is
a map of the error's fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import msgpack
import numpy as np

from teacher.errors import TeacherError, TeacherProtocolError, TeacherRequestError, short
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire import error_fields
from teacher.wire import header as checked
from teacher.wire.frames import Frame, pack, unpack_arrays, unpack_header
from teacher.wire.header import Header
from teacher.wire.messages import (
    LIMITS,
    PROTOCOL_VERSION,
    AsleepSet,
    Cancel,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    Info,
    Kind,
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
    WireDtype,
)
from teacher.wire.request_checks import check_sequences, check_temperature, check_top_k, check_wire_dtype

DEFAULT_LOGITS = LogitSettings()
_MAX_WORKER_NAME_CHARS = 256  # the status contains the names of all workers


# --- encode ----------------------------------------------------------------------------------------------------------


def encode_hello(request_id: int, timeout_s: float) -> list[Frame]:
    """Encode ``Hello``."""
    return pack(Kind.HELLO, request_id, timeout_s=timeout_s)


def encode_info(request_id: int, info: TeacherInfo) -> list[Frame]:
    """Encode ``Info``."""
    return pack(Kind.INFO, request_id, info=asdict(info))


def encode_status_request(request_id: int, timeout_s: float) -> list[Frame]:
    """Encode ``StatusRequest``."""
    return pack(Kind.STATUS_REQUEST, request_id, timeout_s=timeout_s)


def encode_status(request_id: int, status: ServiceStatus) -> list[Frame]:
    """Encode ``Status``. The status is an array of JSON text, because a header is limited in size."""
    text = json.dumps(status.to_dict()).encode()
    return pack(Kind.STATUS, request_id, [np.frombuffer(text, np.uint8)])


def encode_score(
    request_id: int,
    timeout_s: float,
    sequences: Sequence[TeacherSequence],
    logits: LogitSettings = DEFAULT_LOGITS,
    *,
    top_k: int | None = None,
    wire_dtype: WireDtype = "float32",
    model: str = "",
) -> list[Frame]:
    """Encode ``Score``. Token ids are copied, so the caller may change its arrays while the message is queued.

    Args:
        request_id: Id of the request.
        timeout_s: Remaining time until the deadline, in seconds.
        sequences: Sequences to score.
        logits: Temperature, and number of ids with a probability.
        top_k: Log-probabilities per position, None for all that the model returns.
        wire_dtype: Dtype of the returned log-probabilities on the wire.
        model: ``ModelInfo.identity`` that must serve the request, empty for any model.

    Raises:
        TeacherRequestError: An argument is invalid; see ``request_checks``.
    """
    check_sequences(sequences)
    return pack(
        Kind.SCORE,
        request_id,
        [sequence.token_ids.copy() for sequence in sequences],
        timeout_s=timeout_s,
        prompt_lens=[sequence.prompt_len for sequence in sequences],
        temperature=check_temperature(logits.temperature),
        n_ids=logits.n_ids,
        top_k=check_top_k(top_k),
        wire_dtype=check_wire_dtype(wire_dtype),
        model=model,
    )


def encode_score_reply(
    request_id: int, scored: Sequence[ScoredSequence], *, top_k: int = 0, wire_dtype: WireDtype = "float32"
) -> list[Frame]:
    """Encode ``ScoreReply``.

    An array that is sent whole and in its own dtype becomes a frame without a copy. The caller must not change it.

    Args:
        request_id: Id of the request.
        scored: Results in the order of the request.
        top_k: Leading columns to send, 0 for all.
        wire_dtype: Dtype of the log-probabilities on the wire.
    """
    arrays: list[np.ndarray] = []
    for sequence in scored:
        logps_TK, ids_TK = sequence.topk_logps_TK, sequence.topk_ids_TK
        if top_k:
            logps_TK, ids_TK = logps_TK[:, :top_k], ids_TK[:, :top_k]
        arrays += [logps_TK.astype(wire_dtype, copy=False), ids_TK, sequence.sampled_logps_T]
    return pack(Kind.SCORE_REPLY, request_id, arrays)


def encode_cancel(request_id: int) -> list[Frame]:
    """Encode ``Cancel``."""
    return pack(Kind.CANCEL, request_id)


def encode_retry_later(request_id: int, reason: str) -> list[Frame]:
    """Encode ``RetryLater``."""
    return pack(Kind.RETRY_LATER, request_id, reason=reason[: LIMITS.text_chars])


def encode_set_asleep(request_id: int, timeout_s: float, *, asleep: bool) -> list[Frame]:
    """Encode ``SetAsleep``."""
    return pack(Kind.SET_ASLEEP, request_id, timeout_s=timeout_s, asleep=asleep)


def encode_asleep_set(request_id: int, *, asleep: bool, n_workers: int) -> list[Frame]:
    """Encode ``AsleepSet``."""
    return pack(Kind.ASLEEP_SET, request_id, asleep=asleep, n_workers=n_workers)


def encode_error(request_id: int, error: TeacherError) -> list[Frame]:
    """Encode ``Failure``: the fields of the error that have a value, and its text for other protocol versions.

    An error type without a wire code is sent as ``TeacherRequestError``.
    """
    code, data = error_fields.to_wire(error)
    return pack(Kind.ERROR, request_id, code=code, message=str(error)[: LIMITS.text_chars], error=data)


def encode_ready(ready: Ready) -> list[Frame]:
    """Encode ``Ready``."""
    return pack(Kind.READY, 0, **asdict(ready) | {"name": ready.name[: LIMITS.text_chars]})


def encode_heartbeat(heartbeat: Heartbeat) -> list[Frame]:
    """Encode ``Heartbeat``."""
    return pack(Kind.HEARTBEAT, 0, **asdict(heartbeat))


def encode_reregister() -> list[Frame]:
    """Encode ``Reregister``."""
    return pack(Kind.REREGISTER, 0)


def encode_welcome() -> list[Frame]:
    """Encode ``Welcome``."""
    return pack(Kind.WELCOME, 0)


def encode_probe() -> list[Frame]:
    """Encode ``Probe``."""
    return pack(Kind.PROBE, 0)


def encode_goodbye(reason: str, *, broken: bool = False) -> list[Frame]:
    """Encode ``Goodbye``."""
    return pack(Kind.GOODBYE, 0, reason=reason[: LIMITS.text_chars], broken=broken)


def readdress(frames: Sequence[Frame], request_id: int, timeout_s: float | None = None) -> list[Frame]:
    """Return a valid message with another request id, and optionally another timeout.

    Array frames are passed on without a copy.
    """
    header = unpack_header(frames[0])
    header["id"] = request_id
    if timeout_s is not None:
        header["timeout_s"] = timeout_s
    return [msgpack.packb(header), *frames[1:]]


# --- decode ----------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame]) -> Message:
    """Validate a message and return it. Its arrays are views of the frames.

    Raises:
        TeacherProtocolError: The frames are not a valid message of this protocol version.
    """
    if not 1 <= len(frames) <= LIMITS.frames:
        raise TeacherProtocolError(f"expected 1 to {LIMITS.frames} frames, got {len(frames)}")
    header = unpack_header(frames[0])
    kind = header.get("kind")
    if kind == Kind.ERROR.value and header.get("v") != PROTOCOL_VERSION:
        error_type = error_fields.type_of(header.get("code"))  # its fields may be others, but it has a text
        return Failure(checked.request_id(header), error_type(checked.text(header, "message")))
    if (version := header.get("v")) != PROTOCOL_VERSION:
        raise TeacherProtocolError(
            f"message of protocol version {short(version)}, this side uses {PROTOCOL_VERSION}",
            entry="v",
            peer_version=version if type(version) is int and 0 <= version <= error_fields.MAX_COUNT else None,
            remedy="install the same teacher package on the trainer, proxy and worker machines",
        )
    layout = _LAYOUTS.get(kind) if isinstance(kind, str) else None
    if layout is None:
        raise TeacherProtocolError(f"unknown message kind {short(kind)}", entry="kind")
    checked.expect_keys(header, _COMMON_KEYS | layout.keys)
    arrays = unpack_arrays(header, frames[1:])
    if layout.n_arrays is not None and len(arrays) != layout.n_arrays:
        raise TeacherProtocolError(f"expected {layout.n_arrays} arrays, got {len(arrays)}", entry="arrays")
    return layout.decode(header, arrays)


def peek_request_id(frames: Sequence[Frame]) -> int | None:
    """Return the request id of a message that ``decode`` refused, None if it has no valid one."""
    try:
        return checked.request_id(unpack_header(frames[0])) if frames else None
    except TeacherProtocolError:
        return None


def _decode_error(header: Header, arrays: list[np.ndarray]) -> Failure:
    checked.text(header, "message")  # the proxy passes on only the data
    return Failure(checked.request_id(header), error_fields.from_wire(header.get("code"), header.get("error")))


def _decode_info(header: Header, arrays: list[np.ndarray]) -> Info:
    return Info(checked.request_id(header), TeacherInfo(**checked.record(header, TeacherInfo)))


def _decode_status(header: Header, arrays: list[np.ndarray]) -> Status:
    (text_U,) = arrays
    if text_U.dtype != np.uint8 or text_U.nbytes > LIMITS.status_bytes:
        raise TeacherProtocolError(
            f"expected a text of at most {LIMITS.status_bytes} bytes, got {text_U.nbytes}", entry="arrays"
        )
    try:
        values = json.loads(text_U.tobytes())
    except (ValueError, RecursionError) as error:
        raise TeacherProtocolError(f"the status is no JSON: {short(error)}", entry="arrays") from None
    return Status(checked.request_id(header), ServiceStatus.from_dict(values))


def _decode_score(header: Header, arrays: list[np.ndarray]) -> Score:
    prompt_lens = header.get("prompt_lens")
    if not isinstance(prompt_lens, list) or len(prompt_lens) != len(arrays):
        raise TeacherProtocolError(f"expected {len(arrays)} prompt_lens, got {short(prompt_lens)}", entry="prompt_lens")
    sequences = [TeacherSequence(ids_N, n) for ids_N, n in zip(arrays, prompt_lens, strict=True)]
    try:
        check_sequences(sequences)
        temperature = check_temperature(header.get("temperature"))
        wire_dtype = check_wire_dtype(header.get("wire_dtype"))
    except TeacherRequestError as error:
        raise TeacherProtocolError(
            error.what, entry=error.argument, sequence=error.sequence, options=error.options, remedy=error.remedy
        ) from None
    return Score(
        request_id=checked.request_id(header),
        timeout_s=checked.timeout_s(header),
        sequences=sequences,
        logits=LogitSettings(temperature, checked.integer(header, "n_ids", 0, LIMITS.vocab_size)),
        top_k=checked.integer(header, "top_k", 0, LIMITS.vocab_size),
        wire_dtype=wire_dtype,
        model=checked.text(header, "model"),
    )


def _decode_score_reply(header: Header, arrays: list[np.ndarray]) -> ScoreReply:
    if not arrays or len(arrays) % 3:
        raise TeacherProtocolError(
            f"a score reply has three arrays per sequence, got {len(arrays)} arrays", entry="arrays"
        )
    scored = []
    for i, (logps_TK, ids_TK, sampled_T) in enumerate(zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True)):
        got = [(array.dtype.str, array.shape) for array in (logps_TK, ids_TK, sampled_T)]
        shape = logps_TK.shape
        if len(shape) != 2 or got[0][0] not in ("<f4", "<f2") or got[1:] != [("<i4", shape), ("<f4", shape[:1])]:
            raise TeacherProtocolError(
                f"expected float32 or float16 [T,K], int32 [T,K], float32 [T], got {short(got)}", sequence=i
            )
        scored.append(ScoredSequence(logps_TK, ids_TK, sampled_T))
    return ScoreReply(checked.request_id(header), scored)


def _decode_ready(header: Header, arrays: list[np.ndarray]) -> Ready:
    return Ready(
        info=ModelInfo(**checked.record(header, ModelInfo)),
        capacity_tokens=checked.integer(header, "capacity_tokens", 1, 2**40),
        name=checked.text(header, "name")[:_MAX_WORKER_NAME_CHARS],
        stall_timeout_s=checked.number(header, "stall_timeout_s", -1, LIMITS.stall_timeout_s),
        has_sleep_mode=checked.boolean(header, "has_sleep_mode"),
        is_asleep=checked.boolean(header, "is_asleep"),
    )


def _decode_heartbeat(header: Header, arrays: list[np.ndarray]) -> Heartbeat:
    n_steps, n_sequences, n_tokens = (
        checked.integer(header, name, 0, 2**62) for name in ("n_steps", "n_sequences", "n_tokens")
    )
    return Heartbeat(n_steps, n_sequences, n_tokens, checked.number(header, "busy_s", -1, 2**40))


@dataclass(frozen=True)
class _Layout:
    """Expected content of one message kind.

    Attributes:
        decode: Function that makes the message from its header and arrays.
        keys: Header keys besides ``_COMMON_KEYS``.
        n_arrays: Number of arrays, None if ``decode`` checks it.
    """

    decode: Callable[[Header, list[np.ndarray]], Message]
    keys: frozenset[str] = frozenset()
    n_arrays: int | None = 0


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


# Unknown keys are refused: the proxy would pass them on, and they could exceed the next receiver's limits.
_COMMON_KEYS = frozenset({"v", "kind", "id", "arrays"})

_LAYOUTS: dict[str, _Layout] = {
    Kind.HELLO.value: _Layout(lambda h, _: Hello(checked.request_id(h), checked.timeout_s(h)), _keys("timeout_s")),
    Kind.INFO.value: _Layout(_decode_info, _keys("info")),
    Kind.STATUS_REQUEST.value: _Layout(
        lambda h, _: StatusRequest(checked.request_id(h), checked.timeout_s(h)), _keys("timeout_s")
    ),
    Kind.STATUS.value: _Layout(_decode_status, n_arrays=1),
    Kind.SCORE.value: _Layout(
        _decode_score,
        _keys("timeout_s", "prompt_lens", "temperature", "n_ids", "top_k", "wire_dtype", "model"),
        n_arrays=None,
    ),
    Kind.SCORE_REPLY.value: _Layout(_decode_score_reply, n_arrays=None),
    Kind.CANCEL.value: _Layout(lambda h, _: Cancel(checked.request_id(h))),
    Kind.RETRY_LATER.value: _Layout(
        lambda h, _: RetryLater(checked.request_id(h), checked.text(h, "reason")), _keys("reason")
    ),
    Kind.SET_ASLEEP.value: _Layout(
        lambda h, _: SetAsleep(checked.request_id(h), checked.timeout_s(h), checked.boolean(h, "asleep")),
        _keys("timeout_s", "asleep"),
    ),
    Kind.ASLEEP_SET.value: _Layout(
        lambda h, _: AsleepSet(
            checked.request_id(h), checked.boolean(h, "asleep"), checked.integer(h, "n_workers", 0, 2**40)
        ),
        _keys("asleep", "n_workers"),
    ),
    Kind.ERROR.value: _Layout(_decode_error, _keys("code", "message", "error")),
    Kind.READY.value: _Layout(_decode_ready, _keys(*(field.name for field in fields(Ready)))),
    Kind.WELCOME.value: _Layout(lambda *_: Welcome()),
    Kind.HEARTBEAT.value: _Layout(_decode_heartbeat, _keys(*(field.name for field in fields(Heartbeat)))),
    Kind.REREGISTER.value: _Layout(lambda *_: Reregister()),
    Kind.PROBE.value: _Layout(lambda *_: Probe()),
    Kind.GOODBYE.value: _Layout(
        lambda h, _: Goodbye(checked.text(h, "reason"), checked.boolean(h, "broken")), _keys("reason", "broken")
    ),
}
