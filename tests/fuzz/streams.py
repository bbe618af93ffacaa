"""Strategies of bytes on a TCP connection, as lists of writes: ZMTP below ZeroMQ, and HTTP requests."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from teacher.wire.messages import Message
from tests.fuzz.hostile import Frames, changed_chunks, frames_of, one_of
from tests.fuzz.messages import messages

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_PING = b"\x04\x07\x04PING\0\0"
_LONG_FRAME = b"\x02" + (1000).to_bytes(8, "big") + bytes(1000)


def zmtp(socket_type: bytes, *kinds: type[Message]) -> SearchStrategy[Frames]:
    """Return valid and changed streams of a plain ZMTP 3.1 peer: greeting, READY command, and messages of some kinds.

    Args:
        socket_type: ``b"ROUTER"`` or ``b"DEALER"``.
        kinds: Kinds of the messages.
    """
    command = b"\x05READY" + _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    start = [_GREETING, b"\x04" + bytes([len(command)]) + command]
    sent = one_of(messages(*kinds).map(_zmtp_message), st.sampled_from([_PING, _LONG_FRAME]))
    valid = st.lists(sent, max_size=2).map(lambda sent: [*start, *sent])
    return one_of(valid, changed_chunks(valid), changed_chunks(valid))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _zmtp_message(message: Message) -> bytes:
    frames = frames_of(message)
    flags = [b"\x03"] * (len(frames) - 1) + [b"\x02"]
    return b"".join(flag + len(frame).to_bytes(8, "big") + frame for flag, frame in zip(flags, frames, strict=True))


_METHODS = [b"GET", b"GET", b"HEAD", b"POST", b"OPTIONS", b"get", b"", b"\0"]
_PATHS = [b"/healthz", b"/metrics", b"/metrics?name%5B%5D=teacher_workers&name[]=x", b"/x?a=b&c=%ff;d#e", b"*", b"//"]
_VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/9999999999.1", b"HTTP/1.1.1", b"HTTP_", b""]
_HEADERS = [
    *(b"Host: localhost", b"Host:", b"Accept-Encoding: gzip", b"Connection: keep-alive", b"Expect: 100-continue"),
    *(b"Content-Length: 3", b"Content-Length: -1", b"Content-Length: x", b"Transfer-Encoding: chunked", b" ", b"\xff"),
    *(b"Content-Type: text/plain; charset=utf-8", b"Content-Type: multipart", b"a: b\r\n" * 120, b"x" * 17000),
    b"Accept: application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5",
    *(b"Accept: application/openmetrics-text;version=" + version for version in (b"x", b"9.9.9", b"", b"0.0.1;q=nan")),
]
_BODIES = [b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n"]


def http_requests() -> SearchStrategy[Frames]:
    """Return valid and changed HTTP requests, as lines."""
    valid = st.builds(
        lambda method, path, version, headers, body: [
            *(method, b" ", path, b" ", version, b"\r\n"),
            *(header + b"\r\n" for header in headers),
            *(b"\r\n", body),
        ],
        *(st.sampled_from(_METHODS), st.sampled_from(_PATHS), st.sampled_from(_VERSIONS)),
        *(st.lists(st.sampled_from(_HEADERS), max_size=3), st.sampled_from(_BODIES)),
    )
    return one_of(valid, changed_chunks(valid))
