"""Targets that decode a message in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np

from fuzzing import seeds
from fuzzing.coverage import ArcTracer
from fuzzing.targets import Defect, Frames
from teacher.commands.table import format_status
from teacher.errors import TeacherError, TeacherProtocolError, TeacherRequestError
from teacher.records import ModelInfo, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire import protocol, request_checks
from teacher.wire.fields import Content
from teacher.wire.frames import unpack_arrays, unpack_header
from teacher.wire.limits import PROTOCOL_VERSION
from teacher.wire.messages import MESSAGES, REQUEST_ID, Failure, Info, Ready, Score, ScoreReply, Status

_MAX_ERROR_CHARS = 2000
_MAX_ID = 2**63 - 1
_WIRE_TYPES = [
    wire_type
    for message in MESSAGES.values()
    for wire_type in message.wire_types().values()
    if "arrays" not in wire_type.entries
]


class FunctionTarget:
    """Target that calls a function. The function raises one of the documented errors for a refused input."""

    is_stateful = False

    def __init__(
        self,
        name: str,
        function: Callable[[Frames], object],
        seeds: list[Frames],
        *,
        is_message: bool = True,
        refusals: tuple[type[Exception], ...] = (TeacherProtocolError,),
        folder: str | None = None,
    ) -> None:
        """Create the target.

        Args:
            name: Name of the target.
            function: Function that decodes an input.
            seeds: Valid inputs.
            is_message: True if the first frame is a msgpack header.
            refusals: Documented errors.
            folder: Folder of the traced modules, None for ``teacher``.
        """
        self.name, self.seeds, self.is_message = name, seeds, is_message
        self._function, self._refusals = function, refusals
        self._tracer = ArcTracer(folder) if folder is not None else ArcTracer()

    def run(self, frames: Frames) -> bool:
        """Call the function."""
        self._tracer.start()
        try:
            self._function(frames)
        except self._refusals as error:
            if len(str(error)) > _MAX_ERROR_CHARS:
                raise Defect(f"an error message of {len(str(error))} characters repeats the input") from error
            return False
        finally:
            self._tracer.stop()
        return True

    def n_arcs(self) -> int:
        """Return the number of arcs."""
        return len(self._tracer.arcs)

    def resident_bytes(self) -> int | None:
        """Return None."""
        return None

    def reset(self) -> None:
        """Do nothing, because there is no state."""

    def close(self) -> None:
        """Do nothing."""


def decoders() -> dict[str, Callable[[], FunctionTarget]]:
    """Return the factories of the targets by name."""
    requests, replies = seeds.from_clients(), seeds.to_clients()
    worker_side = [*seeds.from_workers(), *seeds.to_workers()]
    every = [*requests, *replies, *worker_side]
    targets = {
        "header": FunctionTarget("header", _read_header, every),
        "frames": FunctionTarget("frames", _read_frames, every),
        "messages": FunctionTarget("messages", _check_messages, requests, refusals=(TeacherError,)),
        "status": FunctionTarget("status", _decode, [reply for reply in replies if b"status" in reply[0]]),
        "protocol_client": FunctionTarget("protocol_client", _decode, requests),
        "protocol_replies": FunctionTarget("protocol_replies", _decode, replies),
        "protocol_worker": FunctionTarget("protocol_worker", _decode, worker_side),
    }
    return {name: lambda target=target: target for name, target in targets.items()}  # type: ignore[misc]


def header_of(frames: Frames) -> dict[Any, Any]:
    """Return the header of a message, empty if it cannot be read."""
    header = _msgpack_value(_first(frames))
    return header if isinstance(header, dict) else {}


def _first(frames: Frames) -> bytes:
    return frames[0] if frames else b""


def _read_header(frames: Frames) -> None:
    """Read every key of a header with every wire type."""
    content = Content(unpack_header(_first(frames)), [])
    for wire_type in _WIRE_TYPES:
        for key in [*content.header, "missing"]:
            with suppress(TeacherProtocolError):
                wire_type.load(content, key)
    REQUEST_ID.load(content, "")


def _read_frames(frames: Frames) -> None:
    header = unpack_header(_first(frames))
    arrays = unpack_arrays(header, frames[1:])
    if any(array.nbytes != len(frame) for array, frame in zip(arrays, frames[1:], strict=True)):
        raise Defect("an array has another size than its frame")


def _check_messages(frames: Frames) -> None:
    """Call the checks of a request's values with the values of a header."""
    header: Any = _msgpack_value(_first(frames))
    if not isinstance(header, dict):
        raise TeacherProtocolError("no header")
    lens = header.get("prompt_lens")
    lens = lens if isinstance(lens, list) else [lens]
    arrays = [np.frombuffer(frame[: len(frame) // 4 * 4], np.int32) for frame in frames[1:]]
    checks: list[Callable[[], object]] = [
        lambda: request_checks.check_temperature(header.get("temperature")),
        lambda: request_checks.check_top_k(header.get("top_k")),
        lambda: request_checks.check_wire_dtype(header.get("wire_dtype")),
    ]
    sequences = [TeacherSequence(ids_N, n) for ids_N, n in zip(arrays, lens, strict=False)]
    for check in checks:
        with suppress(TeacherRequestError):
            check()
    request_checks.check_sequences(sequences)


def _msgpack_value(frame: bytes) -> Any:
    """Return the value of a msgpack frame, None for other bytes."""
    try:
        return msgpack.unpackb(frame)
    except (ValueError, msgpack.UnpackException):
        return None


def _use_status(status: ServiceStatus) -> None:
    """Show a status, like ``python -m teacher status``."""
    format_status(status, "tcp://127.0.0.1:1")
    json.dumps(status.to_dict())


def _decode(frames: Frames) -> None:
    """Decode a message, and do with it what its receivers do."""
    protocol.peek_request_id(frames)
    message = protocol.decode(frames)
    match message:
        case Score():
            _must_decode("readdress", protocol.readdress(frames, message.request_id, 1.0), Score)
            if message.n_tokens <= 0 or not message.sequences:
                raise Defect("a request without tokens was accepted")
        case ScoreReply():
            protocol.readdress(frames, _MAX_ID)
            for scored in message.scored:
                scored.topk_logps_TK.astype(np.float32, copy=False)
        case Ready():
            info = TeacherInfo(**vars(message.info), protocol_version=PROTOCOL_VERSION, n_workers=1)
            _must_decode("the reply to a hello", protocol.encode(Info(1, info)), Info)
            _use_model(message.info)
        case Info():
            _use_model(message.info)
        case Status():
            _use_status(message.status)
        case Failure():
            _must_decode("the error that the proxy passes on", protocol.encode(Failure(1, message.error)), Failure)


def _use_model(info: ModelInfo) -> None:
    """Send a request for this model, as a client does that received the description."""
    info.shown()
    frames = protocol.encode(Score(1, 1.0, seeds.SEQUENCES, model=info.identity))
    _must_decode(f"a request for a model whose name has {len(info.model_name)} characters", frames, Score)


def _must_decode(what: str, frames: list[Any], kind: type) -> None:
    try:
        message = protocol.decode([bytes(frame) for frame in frames])
    except TeacherProtocolError as error:
        reason = re.sub(r"\d+", "N", str(error))[:80]
        raise Defect(f"{what}, made from an accepted message, is refused: {reason}") from error
    if not isinstance(message, kind):
        raise Defect(f"{what} became {type(message).__name__}")
