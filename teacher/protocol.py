"""The wire format: one msgpack header frame, then raw little-endian array frames. No sockets here.

    header = {"v": 1, "kind": "score", "id": 7, ..., "arrays": [["i4", 12], ["f4", 5, 64], ...]}
    frames = [msgpack(header), array 0, array 1, ...]

Ragged: one or three arrays a sequence, response positions only, no padding. Nothing is unpickled. Each count, size and
dtype is compared with `LIMITS` and with the bytes that really arrived before it is used, so a false header costs its
sender an error and the receiver nothing. `v`, `kind`, `id` and `message` keep their meaning in every version: an
error can always be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import msgpack
import numpy as np

from teacher.errors import TeacherError, TeacherProtocolError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.messages import (
    LIMITS,
    PROTOCOL_VERSION,
    Answer,
    Bye,
    Failure,
    Hello,
    Info,
    Kind,
    Message,
    Probe,
    Ready,
    Score,
    Welcome,
    check_sequences,
    check_temperature,
)
from teacher.records import ModelInfo, TeacherAnswer, TeacherInfo, TeacherSequence

Frame = Any  # anything with the buffer protocol: bytes, memoryview, zmq.Frame

_ERROR_OF_CODE: dict[str, type[TeacherError]] = {
    "timeout": TeacherTimeout,
    "protocol": TeacherProtocolError,
    "request": TeacherRequestError,
    "unavailable": TeacherUnavailable,
}
_CODE_OF_ERROR = {error: code for code, error in _ERROR_OF_CODE.items()}
_DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4")}


# --- encode ----------------------------------------------------------------------------------------------------------


def encode_hello(request_id: int, timeout_s: float) -> list[Frame]:
    return _encode(Kind.HELLO, request_id, timeout_s=timeout_s)


def encode_info(request_id: int, info: TeacherInfo) -> list[Frame]:
    return _encode(Kind.INFO, request_id, info=asdict(info))


def encode_score(
    request_id: int, timeout_s: float, sequences: Sequence[TeacherSequence], temperature: float = 1.0
) -> list[Frame]:
    """Token ids are copied: the caller may change its arrays while the message waits in a queue.

    Raises: TeacherRequestError, see `check_sequences` and `check_temperature`.
    """
    check_sequences(sequences)
    temperature = check_temperature(temperature)
    arrays = [sequence.token_ids.copy() for sequence in sequences]
    prompt_lens = [sequence.prompt_len for sequence in sequences]
    return _encode(
        Kind.SCORE, request_id, arrays, timeout_s=timeout_s, prompt_lens=prompt_lens, temperature=temperature
    )


def encode_answer(request_id: int, answers: Sequence[TeacherAnswer]) -> list[Frame]:
    """The arrays themselves are the frames (no copy): they must not change any more."""
    arrays: list[np.ndarray] = []
    for answer in answers:
        arrays += [answer.topk_logps_TK, answer.topk_ids_TK, answer.sampled_logps_T]
    return _encode(Kind.ANSWER, request_id, arrays)


def encode_error(request_id: int, error: TeacherError) -> list[Frame]:
    code = _CODE_OF_ERROR.get(type(error), "request")
    return _encode(Kind.ERROR, request_id, code=code, message=str(error)[: LIMITS.text_chars])


def encode_ready(info: ModelInfo, capacity_tokens: int) -> list[Frame]:
    return _encode(Kind.READY, 0, info=asdict(info), capacity_tokens=capacity_tokens)


def encode_welcome() -> list[Frame]:
    return _encode(Kind.WELCOME, 0)


def encode_probe() -> list[Frame]:
    return _encode(Kind.PROBE, 0)


def encode_bye(reason: str) -> list[Frame]:
    return _encode(Kind.BYE, 0, reason=reason[: LIMITS.text_chars])


def readdress(frames: Sequence[Frame], request_id: int, timeout_s: float | None = None) -> list[Frame]:
    """The same valid message under another request id (and with another time left); array frames are passed on."""
    header = _unpack_header(frames[0])
    header["id"] = request_id
    if timeout_s is not None:
        header["timeout_s"] = timeout_s
    return [msgpack.packb(header), *frames[1:]]


def _encode(kind: Kind, request_id: int, arrays: Sequence[np.ndarray] = (), **values: Any) -> list[Frame]:
    specs, frames = [], []
    for array in arrays:
        code = f"{array.dtype.kind}{array.dtype.itemsize}"
        array = np.ascontiguousarray(array, dtype=_DTYPES[code])
        specs.append([code, *array.shape])
        frames.append(array.data.cast("B"))
    header = {"v": PROTOCOL_VERSION, "kind": kind.value, "id": request_id, **values, "arrays": specs}
    return [msgpack.packb(header), *frames]


# --- decode ----------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame]) -> Message:
    """Check everything, then hand out records whose arrays are views of the frames.

    Raises: TeacherProtocolError.
    """
    if not 1 <= len(frames) <= LIMITS.frames:
        raise TeacherProtocolError(f"expected 1 to {LIMITS.frames} frames, got {len(frames)}")
    header = _unpack_header(frames[0])
    kind = header.get("kind")
    if kind == Kind.ERROR.value:  # before the version check: a peer of another version must be able to say so
        return _decode_error(header)
    if header.get("v") != PROTOCOL_VERSION:
        raise TeacherProtocolError(
            f"message of protocol version {_short(header.get('v'))}, this side speaks {PROTOCOL_VERSION}; "
            "install the same teacher package on the trainer, proxy and worker machines"
        )
    decoder = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise TeacherProtocolError(f"unknown message kind {_short(kind)}")
    return decoder(header, _decode_arrays(header, frames[1:]))


def peek_request_id(frames: Sequence[Frame]) -> int | None:
    """The request id of a message that `decode` refused, if there is one to answer to."""
    try:
        return _int(_unpack_header(frames[0]), "id", 0, 2**63 - 1) if frames else None
    except TeacherProtocolError:
        return None


def _unpack_header(frame: Frame) -> dict[str, Any]:
    data = memoryview(frame)
    if data.nbytes > LIMITS.header_bytes:
        raise TeacherProtocolError(f"header of {data.nbytes} bytes, at most {LIMITS.header_bytes} are allowed")
    try:
        # The explicit bounds matter: by default msgpack believes a nested array's count up to the length of the
        # data, and allocates it, once a nesting level.
        header = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_array_len=LIMITS.frames,
            max_map_len=32,
            max_str_len=4 * LIMITS.text_chars,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise TeacherProtocolError(f"header is no msgpack: {_short(error)}") from None
    if not isinstance(header, dict):
        raise TeacherProtocolError(f"header must be a map, got {type(header).__name__}")
    return header


def _decode_arrays(header: dict[str, Any], frames: Sequence[Frame]) -> list[np.ndarray]:
    specs = header.get("arrays")
    if not isinstance(specs, list) or len(specs) != len(frames):
        n_specs = len(specs) if isinstance(specs, list) else _short(specs)
        raise TeacherProtocolError(f"header announces {n_specs} arrays, {len(frames)} array frames arrived")
    return [_decode_array(spec, frame) for spec, frame in zip(specs, frames, strict=True)]


def _decode_array(spec: Any, frame: Frame) -> np.ndarray:
    if not isinstance(spec, list) or not 2 <= len(spec) <= 3 or not isinstance(spec[0], str) or spec[0] not in _DTYPES:
        raise TeacherProtocolError(f"array must be announced as [dtype, size(, size)], got {_short(spec)}")
    dtype, shape = _DTYPES[spec[0]], spec[1:]
    if any(type(size) is not int or not 1 <= size <= LIMITS.vocab_size for size in shape):
        raise TeacherProtocolError(f"array sizes must be 1 to {LIMITS.vocab_size}, got {_short(shape)}")
    n_bytes = memoryview(frame).nbytes
    if math.prod(shape) * dtype.itemsize != n_bytes:
        raise TeacherProtocolError(f"array announced as {_short(spec)} arrived with {n_bytes} bytes")
    return np.frombuffer(frame, dtype).reshape(shape)


def _decode_hello(header: dict[str, Any], arrays: list[np.ndarray]) -> Hello:
    _expect_arrays(arrays, 0)
    return Hello(_request_id(header), _timeout_s(header))


def _decode_info(header: dict[str, Any], arrays: list[np.ndarray]) -> Info:
    _expect_arrays(arrays, 0)
    return Info(_request_id(header), TeacherInfo(**_record(header, TeacherInfo)))


def _decode_score(header: dict[str, Any], arrays: list[np.ndarray]) -> Score:
    prompt_lens = header.get("prompt_lens")
    if not isinstance(prompt_lens, list) or len(prompt_lens) != len(arrays):
        raise TeacherProtocolError(f"expected {len(arrays)} prompt_lens, got {_short(prompt_lens)}")
    sequences = [TeacherSequence(ids, n) for ids, n in zip(arrays, prompt_lens, strict=True)]
    try:
        check_sequences(sequences)
        temperature = check_temperature(header.get("temperature"))
    except TeacherRequestError as error:
        raise TeacherProtocolError(str(error)) from None
    return Score(_request_id(header), _timeout_s(header), sequences, temperature)


def _decode_answer(header: dict[str, Any], arrays: list[np.ndarray]) -> Answer:
    if not arrays or len(arrays) % 3:
        raise TeacherProtocolError(f"an answer has three arrays a sequence, got {len(arrays)} arrays")
    answers = []
    for logps_TK, ids_TK, sampled_T in zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True):
        got = [(array.dtype.str, array.shape) for array in (logps_TK, ids_TK, sampled_T)]
        if logps_TK.ndim != 2 or got != [("<f4", logps_TK.shape), ("<i4", logps_TK.shape), ("<f4", logps_TK.shape[:1])]:
            raise TeacherProtocolError(f"expected float32 [T,K], int32 [T,K], float32 [T], got {_short(got)}")
        answers.append(TeacherAnswer(logps_TK, ids_TK, sampled_T))
    return Answer(_request_id(header), answers)


def _decode_ready(header: dict[str, Any], arrays: list[np.ndarray]) -> Ready:
    _expect_arrays(arrays, 0)
    return Ready(ModelInfo(**_record(header, ModelInfo)), _int(header, "capacity_tokens", 1, 2**40))


def _decode_welcome(header: dict[str, Any], arrays: list[np.ndarray]) -> Welcome:
    _expect_arrays(arrays, 0)
    return Welcome()


def _decode_probe(header: dict[str, Any], arrays: list[np.ndarray]) -> Probe:
    _expect_arrays(arrays, 0)
    return Probe()


def _decode_bye(header: dict[str, Any], arrays: list[np.ndarray]) -> Bye:
    _expect_arrays(arrays, 0)
    return Bye(_text(header, "reason"))


def _decode_error(header: dict[str, Any]) -> Failure:
    code = header.get("code")
    error = _ERROR_OF_CODE.get(code, TeacherRequestError) if isinstance(code, str) else TeacherRequestError
    return Failure(_request_id(header), error(_text(header, "message")))


_DECODERS: dict[str, Callable[[dict[str, Any], list[np.ndarray]], Message]] = {
    Kind.HELLO.value: _decode_hello,
    Kind.INFO.value: _decode_info,
    Kind.SCORE.value: _decode_score,
    Kind.ANSWER.value: _decode_answer,
    Kind.READY.value: _decode_ready,
    Kind.WELCOME.value: _decode_welcome,
    Kind.PROBE.value: _decode_probe,
    Kind.BYE.value: _decode_bye,
}


# --- checked reads of header values ----------------------------------------------------------------------------------


def _expect_arrays(arrays: list[np.ndarray], n: int) -> None:
    if len(arrays) != n:
        raise TeacherProtocolError(f"expected {n} arrays, got {len(arrays)}")


def _request_id(header: dict[str, Any]) -> int:
    return _int(header, "id", 0, 2**63 - 1)


def _int(header: dict[str, Any], key: str, low: int, high: int) -> int:
    value = header.get(key)
    if type(value) is not int or not low <= value <= high:  # `type`, because True is an int for isinstance
        raise TeacherProtocolError(f"{key} must be an integer from {low} to {high}, got {_short(value)}")
    return value


def _text(header: dict[str, Any], key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str) or len(value) > LIMITS.text_chars:
        raise TeacherProtocolError(
            f"{key} must be a text of at most {LIMITS.text_chars} characters, got {_short(value)}"
        )
    return value


def _timeout_s(header: dict[str, Any]) -> float:
    value = header.get("timeout_s")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LIMITS.timeout_s:
        raise TeacherProtocolError(f"timeout_s must be above 0 and at most {LIMITS.timeout_s:.0f}, got {_short(value)}")
    return float(value)


def _record(header: dict[str, Any], record: type[ModelInfo]) -> dict[str, Any]:
    info = header.get("info")
    names = {field.name: field.type for field in fields(record)}
    if not isinstance(info, dict) or set(info) != set(names):
        raise TeacherProtocolError(f"info must have the keys {sorted(names)}, got {_short(info)}")
    # The annotations, which are texts in that module.
    read: dict[Any, Callable[[dict[str, Any], str], Any]] = {
        "str": _text,
        "int": lambda info, name: _int(info, name, 0, 2**40),
        "tuple[int, ...]": _token_ids,
    }
    return {name: read[kind](info, name) for name, kind in names.items()}


def _token_ids(header: dict[str, Any], key: str) -> tuple[int, ...]:
    ids = header.get(key)
    if (
        not isinstance(ids, list)
        or len(ids) > LIMITS.eos_token_ids
        or any(type(token_id) is not int or not 0 <= token_id < LIMITS.vocab_size for token_id in ids)
    ):
        raise TeacherProtocolError(f"{key} must be at most {LIMITS.eos_token_ids} token ids, got {_short(ids)}")
    return tuple(ids)


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
