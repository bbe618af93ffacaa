"""The wire format: one msgpack header frame, then raw little-endian array frames. No sockets here.

    header = {"v": 5, "kind": "score", "id": 7, ..., "arrays": [["i4", 12], ["f4", 5, 64], ...]}
    frames = [msgpack(header), array 0, array 1, ...]

Ragged: one or three arrays a sequence, response positions only, no padding. Nothing is unpickled. Each count, size and
dtype is compared with `LIMITS` and with the bytes that really arrived before it is used, so a false header costs its
sender an error and the receiver nothing. `v`, `kind`, `id` and `message` keep their meaning in every version: an
error can always be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import msgpack
import numpy as np

from teacher.errors import (
    TeacherChanged,
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherTimeout,
    TeacherUnavailable,
)
from teacher.records import ModelInfo, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire import header as checked
from teacher.wire.frames import Frame, pack, unpack_arrays, unpack_header
from teacher.wire.header import short
from teacher.wire.messages import (
    LIMITS,
    PROTOCOL_VERSION,
    Answer,
    AskStatus,
    Bye,
    Cancel,
    Failure,
    Hello,
    Info,
    Kind,
    Later,
    Message,
    Probe,
    Pulse,
    Ready,
    Rejoin,
    Score,
    Status,
    Welcome,
    WireDtype,
    check_sequences,
    check_temperature,
    check_top_k,
    check_wire_dtype,
)

_ERROR_OF_CODE: dict[str, type[TeacherError]] = {
    "changed": TeacherChanged,
    "timeout": TeacherTimeout,
    "protocol": TeacherProtocolError,
    "request": TeacherRequestError,
    "unavailable": TeacherUnavailable,
}
_CODE_OF_ERROR = {error: code for code, error in _ERROR_OF_CODE.items()}


# --- encode ----------------------------------------------------------------------------------------------------------


def encode_hello(request_id: int, timeout_s: float) -> list[Frame]:
    return pack(Kind.HELLO, request_id, timeout_s=timeout_s)


def encode_info(request_id: int, info: TeacherInfo) -> list[Frame]:
    return pack(Kind.INFO, request_id, info=asdict(info))


def encode_ask_status(request_id: int, timeout_s: float) -> list[Frame]:
    return pack(Kind.ASK_STATUS, request_id, timeout_s=timeout_s)


def encode_status(request_id: int, status: ServiceStatus) -> list[Frame]:
    text = json.dumps(status.to_dict()).encode()
    return pack(Kind.STATUS, request_id, [np.frombuffer(text, np.uint8)])


def encode_score(
    request_id: int,
    timeout_s: float,
    sequences: Sequence[TeacherSequence],
    temperature: float = 1.0,
    *,
    top_k: int | None = None,
    wire_dtype: WireDtype = "float32",
    model: str = "",
) -> list[Frame]:
    """Token ids are copied: the caller may change its arrays while the message waits in a queue.

    Raises: TeacherRequestError, see the `check_*` of `messages`.
    """
    check_sequences(sequences)
    return pack(
        Kind.SCORE,
        request_id,
        [sequence.token_ids.copy() for sequence in sequences],
        timeout_s=timeout_s,
        prompt_lens=[sequence.prompt_len for sequence in sequences],
        temperature=check_temperature(temperature),
        top_k=check_top_k(top_k),
        wire_dtype=check_wire_dtype(wire_dtype),
        model=model,
    )


def encode_answer(
    request_id: int, answers: Sequence[ScoredSequence], *, top_k: int = 0, wire_dtype: WireDtype = "float32"
) -> list[Frame]:
    """The first `top_k` of each row, all if 0.

    Arrays that travel whole and in their own dtype are the frames themselves (no copy): they must not change any more.
    """
    arrays: list[np.ndarray] = []
    for answer in answers:
        logps_TK, ids_TK = answer.topk_logps_TK, answer.topk_ids_TK
        if top_k:
            logps_TK, ids_TK = logps_TK[:, :top_k], ids_TK[:, :top_k]
        arrays += [logps_TK.astype(wire_dtype, copy=False), ids_TK, answer.sampled_logps_T]
    return pack(Kind.ANSWER, request_id, arrays)


def encode_cancel(request_id: int) -> list[Frame]:
    return pack(Kind.CANCEL, request_id)


def encode_later(request_id: int, reason: str) -> list[Frame]:
    return pack(Kind.LATER, request_id, reason=reason[: LIMITS.text_chars])


def encode_error(request_id: int, error: TeacherError) -> list[Frame]:
    code = _CODE_OF_ERROR.get(type(error), "request")
    return pack(Kind.ERROR, request_id, code=code, message=str(error)[: LIMITS.text_chars])


def encode_ready(ready: Ready) -> list[Frame]:
    return pack(Kind.READY, 0, **asdict(ready) | {"name": ready.name[: LIMITS.text_chars]})


def encode_pulse(pulse: Pulse) -> list[Frame]:
    return pack(Kind.PULSE, 0, **asdict(pulse))


def encode_rejoin() -> list[Frame]:
    return pack(Kind.REJOIN, 0)


def encode_welcome() -> list[Frame]:
    return pack(Kind.WELCOME, 0)


def encode_probe() -> list[Frame]:
    return pack(Kind.PROBE, 0)


def encode_bye(reason: str, *, broken: bool = False) -> list[Frame]:
    return pack(Kind.BYE, 0, reason=reason[: LIMITS.text_chars], broken=broken)


def readdress(frames: Sequence[Frame], request_id: int, timeout_s: float | None = None) -> list[Frame]:
    """The same valid message under another request id (and with another time left); array frames are passed on."""
    header = unpack_header(frames[0])
    header["id"] = request_id
    if timeout_s is not None:
        header["timeout_s"] = timeout_s
    return [msgpack.packb(header), *frames[1:]]


# --- decode ----------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame]) -> Message:
    """Check everything, then hand out records whose arrays are views of the frames.

    Raises: TeacherProtocolError.
    """
    if not 1 <= len(frames) <= LIMITS.frames:
        raise TeacherProtocolError(f"expected 1 to {LIMITS.frames} frames, got {len(frames)}")
    header = unpack_header(frames[0])
    kind = header.get("kind")
    if kind == Kind.ERROR.value:  # before the version check: a peer of another version must be able to say so
        return _decode_error(header)
    if header.get("v") != PROTOCOL_VERSION:
        raise TeacherProtocolError(
            f"message of protocol version {short(header.get('v'))}, this side speaks {PROTOCOL_VERSION}; "
            "install the same teacher package on the trainer, proxy and worker machines"
        )
    decoder = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise TeacherProtocolError(f"unknown message kind {short(kind)}")
    checked.expect_keys(header, _KEYS_OF_ALL | _KEYS.get(str(kind), set()))
    return decoder(header, unpack_arrays(header, frames[1:]))


def peek_request_id(frames: Sequence[Frame]) -> int | None:
    """The request id of a message that `decode` refused, if there is one to answer to."""
    try:
        return checked.request_id(unpack_header(frames[0])) if frames else None
    except TeacherProtocolError:
        return None


def _decode_hello(header: dict[str, Any], arrays: list[np.ndarray]) -> Hello:
    _expect_arrays(arrays, 0)
    return Hello(checked.request_id(header), checked.timeout_s(header))


def _decode_info(header: dict[str, Any], arrays: list[np.ndarray]) -> Info:
    _expect_arrays(arrays, 0)
    return Info(checked.request_id(header), TeacherInfo(**checked.record(header, TeacherInfo)))


def _decode_ask_status(header: dict[str, Any], arrays: list[np.ndarray]) -> AskStatus:
    _expect_arrays(arrays, 0)
    return AskStatus(checked.request_id(header), checked.timeout_s(header))


def _decode_status(header: dict[str, Any], arrays: list[np.ndarray]) -> Status:
    _expect_arrays(arrays, 1)
    if arrays[0].dtype != np.uint8 or arrays[0].nbytes > LIMITS.status_bytes:
        raise TeacherProtocolError(f"expected a text of at most {LIMITS.status_bytes} bytes, got {arrays[0].nbytes}")
    try:
        values = json.loads(arrays[0].tobytes())
    except (ValueError, RecursionError) as error:
        raise TeacherProtocolError(f"the status is no JSON: {short(error)}") from None
    return Status(checked.request_id(header), ServiceStatus.from_dict(values))


def _decode_score(header: dict[str, Any], arrays: list[np.ndarray]) -> Score:
    prompt_lens = header.get("prompt_lens")
    if not isinstance(prompt_lens, list) or len(prompt_lens) != len(arrays):
        raise TeacherProtocolError(f"expected {len(arrays)} prompt_lens, got {short(prompt_lens)}")
    sequences = [TeacherSequence(ids, n) for ids, n in zip(arrays, prompt_lens, strict=True)]
    try:
        check_sequences(sequences)
        temperature = check_temperature(header.get("temperature"))
        wire_dtype = check_wire_dtype(header.get("wire_dtype"))
    except TeacherRequestError as error:
        raise TeacherProtocolError(str(error)) from None
    top_k = checked.integer(header, "top_k", 0, LIMITS.vocab_size)
    return Score(
        checked.request_id(header),
        checked.timeout_s(header),
        sequences,
        temperature,
        top_k,
        wire_dtype,
        checked.text(header, "model"),
    )


def _decode_answer(header: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
    if not arrays or len(arrays) % 3:
        raise TeacherProtocolError(f"an answer has three arrays a sequence, got {len(arrays)} arrays")
    answers = []
    for logps_TK, ids_TK, sampled_T in zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True):
        got = [(array.dtype.str, array.shape) for array in (logps_TK, ids_TK, sampled_T)]
        size = logps_TK.shape
        if len(size) != 2 or got[0][0] not in ("<f4", "<f2") or got[1:] != [("<i4", size), ("<f4", size[:1])]:
            raise TeacherProtocolError(f"expected float32 or float16 [T,K], int32 [T,K], float32 [T], got {short(got)}")
        answers.append(ScoredSequence(logps_TK, ids_TK, sampled_T))
    return Answer(checked.request_id(header), answers)


def _decode_ready(header: dict[str, Any], arrays: list[np.ndarray]) -> Ready:
    _expect_arrays(arrays, 0)
    capacity_tokens = checked.integer(header, "capacity_tokens", 1, 2**40)
    stall_timeout_s = checked.number(header, "stall_timeout_s", -1, LIMITS.stall_timeout_s)
    info = ModelInfo(**checked.record(header, ModelInfo))
    return Ready(info, capacity_tokens, checked.text(header, "name"), stall_timeout_s)


def _decode_cancel(header: dict[str, Any], arrays: list[np.ndarray]) -> Cancel:
    _expect_arrays(arrays, 0)
    return Cancel(checked.request_id(header))


def _decode_later(header: dict[str, Any], arrays: list[np.ndarray]) -> Later:
    _expect_arrays(arrays, 0)
    return Later(checked.request_id(header), checked.text(header, "reason"))


def _decode_pulse(header: dict[str, Any], arrays: list[np.ndarray]) -> Pulse:
    _expect_arrays(arrays, 0)
    n_steps, n_sequences, n_tokens = (
        checked.integer(header, name, 0, 2**62) for name in ("n_steps", "n_sequences", "n_tokens")
    )
    return Pulse(n_steps, n_sequences, n_tokens, checked.number(header, "busy_s", -1, 2**40))


def _decode_rejoin(header: dict[str, Any], arrays: list[np.ndarray]) -> Rejoin:
    _expect_arrays(arrays, 0)
    return Rejoin()


def _decode_welcome(header: dict[str, Any], arrays: list[np.ndarray]) -> Welcome:
    _expect_arrays(arrays, 0)
    return Welcome()


def _decode_probe(header: dict[str, Any], arrays: list[np.ndarray]) -> Probe:
    _expect_arrays(arrays, 0)
    return Probe()


def _decode_bye(header: dict[str, Any], arrays: list[np.ndarray]) -> Bye:
    _expect_arrays(arrays, 0)
    return Bye(checked.text(header, "reason"), checked.boolean(header, "broken"))


def _decode_error(header: dict[str, Any]) -> Failure:
    code = header.get("code")
    error = _ERROR_OF_CODE.get(code, TeacherRequestError) if isinstance(code, str) else TeacherRequestError
    return Failure(checked.request_id(header), error(checked.text(header, "message")))


# A key that nobody reads would still be passed on, and could grow beyond what the next one takes.
_KEYS_OF_ALL = {"v", "kind", "id", "arrays"}
_KEYS = {
    Kind.HELLO.value: {"timeout_s"},
    Kind.INFO.value: {"info"},
    Kind.ASK_STATUS.value: {"timeout_s"},
    Kind.SCORE.value: {"timeout_s", "prompt_lens", "temperature", "top_k", "wire_dtype", "model"},
    Kind.LATER.value: {"reason"},
    Kind.READY.value: {field.name for field in fields(Ready)},
    Kind.PULSE.value: {field.name for field in fields(Pulse)},
    Kind.BYE.value: {"reason", "broken"},
}

_DECODERS: dict[str, Callable[[dict[str, Any], list[np.ndarray]], Message]] = {
    Kind.HELLO.value: _decode_hello,
    Kind.INFO.value: _decode_info,
    Kind.ASK_STATUS.value: _decode_ask_status,
    Kind.STATUS.value: _decode_status,
    Kind.SCORE.value: _decode_score,
    Kind.ANSWER.value: _decode_answer,
    Kind.CANCEL.value: _decode_cancel,
    Kind.LATER.value: _decode_later,
    Kind.READY.value: _decode_ready,
    Kind.PULSE.value: _decode_pulse,
    Kind.REJOIN.value: _decode_rejoin,
    Kind.WELCOME.value: _decode_welcome,
    Kind.PROBE.value: _decode_probe,
    Kind.BYE.value: _decode_bye,
}


def _expect_arrays(arrays: list[np.ndarray], n: int) -> None:
    if len(arrays) != n:
        raise TeacherProtocolError(f"expected {n} arrays, got {len(arrays)}")
