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
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np

from teacher.errors import TeacherError, TeacherProtocolError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.records import ModelInfo, TeacherAnswer, TeacherInfo, TeacherSequence

PROTOCOL_VERSION = 2

Frame = Any  # anything with the buffer protocol: bytes, memoryview, zmq.Frame


@dataclass(frozen=True)
class Limits:
    """Upper bounds of one message. They bound memory, not usefulness: no sane request comes near them."""

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

_ERROR_OF_CODE: dict[str, type[TeacherError]] = {
    "timeout": TeacherTimeout,
    "protocol": TeacherProtocolError,
    "request": TeacherRequestError,
    "unavailable": TeacherUnavailable,
}
_CODE_OF_ERROR = {error: code for code, error in _ERROR_OF_CODE.items()}
_SPLIT_HINT = "ask for less at once: raise actor_rollout_ref.teacher.num_microbatches"
_DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4")}


# --- checks on a request, for the sender as well as for the receiver -------------------------------------------------


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


# --- encode ----------------------------------------------------------------------------------------------------------


def encode_hello(request_id: int, timeout_s: float) -> list[Frame]:
    return _encode(Kind.HELLO, request_id, timeout_s=timeout_s)


def encode_info(request_id: int, info: TeacherInfo) -> list[Frame]:
    return _encode(Kind.INFO, request_id, info=asdict(info))


def encode_score(request_id: int, timeout_s: float, sequences: Sequence[TeacherSequence]) -> list[Frame]:
    """Token ids are copied: the caller may change its arrays while the message waits in a queue.

    Raises: TeacherRequestError, see `check_sequences`.
    """
    check_sequences(sequences)
    arrays = [sequence.token_ids.copy() for sequence in sequences]
    prompt_lens = [sequence.prompt_len for sequence in sequences]
    return _encode(Kind.SCORE, request_id, arrays, timeout_s=timeout_s, prompt_lens=prompt_lens)


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
    except TeacherRequestError as error:
        raise TeacherProtocolError(str(error)) from None
    return Score(_request_id(header), _timeout_s(header), sequences)


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
