"""Encoding and decoding of messages, as ``messages`` declares them. This module opens no sockets.

A message is one msgpack header frame, followed by raw little-endian array frames::

    header = {"v": PROTOCOL_VERSION, "kind": "score", "id": 7, ..., "arrays": [["i4", 12], ["f4", 5, 64], ...]}
    frames = [msgpack(header), array 0, array 1, ...]

Arrays are ragged: one or two (request) or three (reply) per sequence, response positions only, without padding.
Nothing is unpickled. Every count, size and dtype is compared with ``LIMITS`` and with the received bytes before it is
used, so an invalid header causes an error but no large allocation. The entries ``v``, ``kind``, ``id``, ``code`` and
``message`` keep their meaning in every protocol version, so that the text of an error can always be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from teacher.errors import TeacherProtocolError, short
from teacher.wire.error_fields import ErrorFields
from teacher.wire.fields import MAX_COUNT, Content
from teacher.wire.frames import Frame, expect_keys, pack, unpack_arrays, unpack_header
from teacher.wire.limits import LIMITS, PROTOCOL_VERSION
from teacher.wire.messages import MESSAGES, REQUEST_ID, Failure, Message

_COMMON_ENTRIES = frozenset({"v", "kind", "id", "arrays"})
_ENTRIES = {
    kind: {entry for name, wire_type in message.wire_types().items() for entry in wire_type.entries or (name,)}
    for kind, message in MESSAGES.items()
}


def encode(message: Message) -> list[Frame]:
    """Return the frames of a message. Contiguous little-endian arrays are not copied, except for the token ids.

    Raises:
        TeacherRequestError: An argument of a ``Score`` is invalid; see ``request_checks``.
    """
    content = Content({"v": PROTOCOL_VERSION, "kind": message.kind, "id": 0}, [])
    for name, wire_type in message.wire_types().items():
        wire_type.store(content, name, getattr(message, name))
    return pack(content.header, content.arrays)


def decode(frames: Sequence[Frame]) -> Message:
    """Validate a message and return it. Its arrays are views of the frames.

    Raises:
        TeacherProtocolError: The frames are not a valid message of this protocol version.
    """
    if not 1 <= len(frames) <= LIMITS.frames:
        raise TeacherProtocolError(f"expected 1 to {LIMITS.frames} frames, got {len(frames)}")
    header = unpack_header(frames[0])
    kind, version = header.get("kind"), header.get("v")
    if version != PROTOCOL_VERSION:
        if kind == Failure.kind:
            content = Content(header, [])
            return Failure(REQUEST_ID.load(content, ""), ErrorFields().load_text(content))
        raise TeacherProtocolError(
            f"message of protocol version {short(version)}, this side uses {PROTOCOL_VERSION}",
            entry="v",
            peer_version=version if type(version) is int and 0 <= version <= MAX_COUNT else None,
            remedy="install the same teacher package on the trainer, proxy and worker machines",
        )
    message = MESSAGES.get(kind) if isinstance(kind, str) else None
    if message is None:
        raise TeacherProtocolError(f"unknown message kind {short(kind)}", entry="kind")
    entries = _ENTRIES[message.kind]
    # Unknown entries are refused: the proxy would pass them on, and they could exceed the next receiver's limits.
    expect_keys(header, _COMMON_ENTRIES | entries)
    content = Content(header, unpack_arrays(header, frames[1:]))
    if content.arrays and "arrays" not in entries:
        raise TeacherProtocolError(f"expected no arrays, got {len(content.arrays)}", entry="arrays")
    return message(**{name: wire_type.load(content, name) for name, wire_type in message.wire_types().items()})


def peek_request_id(frames: Sequence[Frame]) -> int | None:
    """Return the request id of a message that ``decode`` refused, None if it has no valid one."""
    try:
        return REQUEST_ID.load(Content(unpack_header(frames[0]), []), "") if frames else None
    except TeacherProtocolError:
        return None


def readdress(frames: Sequence[Frame], request_id: int, timeout_s: float | None = None) -> list[Frame]:
    """Return a valid message with another request id, and optionally another timeout.

    Array frames are passed on without a copy.
    """
    header = unpack_header(frames[0])
    header["id"] = request_id
    if timeout_s is not None:
        header["timeout_s"] = timeout_s
    return [msgpack.packb(header), *frames[1:]]
