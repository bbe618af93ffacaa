"""Strategies of hostile inputs: changed messages, and arbitrary bytes and msgpack. An input is a list of frames."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from teacher.wire import protocol
from teacher.wire.limits import LIMITS, PROTOCOL_VERSION
from teacher.wire.messages import MESSAGES, Message
from tests.fuzz.messages import OPEN_ID, messages

Frames = list[bytes]

MAX_INPUT_BYTES = 1 << 20
_ITEM_BYTES = {"i4": 4, "f4": 4, "f2": 2, "u1": 1}
SIZES = [1, 2, 3, 5, 64, 1000, 1, 2**20, LIMITS.vocab_size, 2**31, 2**62]
_DEEP = {"<list>": b"\x91" * 1005 + b"\xc0", "<map>": b"\x81\xa1a" * 1005 + b"\xc0"}
"""Placeholders of values that msgpack unpacks and does not pack."""


def nested(depth: int) -> list[Any]:
    """Return a list in ``depth`` lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


EXTREME: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16, LIMITS.vocab_size, LIMITS.vocab_size + 1),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, 5e-324, 1e-6, 1e308, LIMITS.timeout_s, math.inf, -math.inf, math.nan),
    *("", "x", "\0", "\n", "\x7f", "\u202e", "\U0001f600", "float16", "i4", "u1", "9" * 5000, "%s%n{0}", *MESSAGES),
    *("x" * LIMITS.text_chars, "x" * (LIMITS.text_chars + 1), "\U0001f600" * LIMITS.text_chars, *_DEEP),
    *([], [[]], {}, [0], [1, 2, 3], ["i4", 1], ["f4", 2, 2], ["u1", 0], {"id": 1}, nested(20), nested(300)),
    *([0] * LIMITS.frames, [0] * (LIMITS.frames + 1), {str(i): i for i in range(40)}),
]
_NO_JSON = [b"", b"\xff", b"x" * 300, msgpack.ExtType(1, b""), msgpack.ExtType(5, b"abc"), msgpack.Timestamp(1, 2)]
_ONLY_JSON = [10**400, -(10**400), 10**4000, nested(900)]
_PIECES = [
    *(b"", b"\0", b"\xff" * 4, b"\0" * 4, b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xd9\xff", b"\xdc\xff\xff"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xcb\x7f\xf8" + bytes(6), b"\xca\x7f\x80\0\0", b"\xc9\0\0\0\x10", b"\xd6\xff\0\0\0\0", b"\x91" * 600),
    *(b"\x81\xa0" * 300, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xed\xa0\x80", b"\r\n", b" ", b":", b"[" * 2000),
    *(bytes(64), bytes(4096), bytes(70_000)),
]


def one_of(*strategies: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Return values of one of the strategies, each with the same probability. ``st.one_of`` counts their branches."""
    return st.sampled_from(strategies).flatmap(lambda strategy: strategy)


_random = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
json_values = one_of(st.sampled_from(EXTREME + _ONLY_JSON), _random)
values = one_of(st.sampled_from(EXTREME + _NO_JSON), _random)


def changed(valid: SearchStrategy[Message]) -> SearchStrategy[Frames]:
    """Return messages of which frames, entries of the header or single bytes are changed one to four times."""
    changes = [_change_header, _change_text, _change_bytes, _change_frames, _resize_array, _change_header]
    return _changed(valid.map(frames_of), changes)


def changed_chunks(chunks: SearchStrategy[Frames]) -> SearchStrategy[Frames]:
    """Return lists of byte strings, such as the lines of a request, of which bytes or whole strings are changed."""
    return _changed(chunks, [_change_bytes, _change_frames])


def hostile(*kinds: type[Message]) -> SearchStrategy[Frames]:
    """Return valid, changed and arbitrary messages. The first two are of some kinds, all kinds by default."""
    valid = messages(*kinds)
    return one_of(valid.map(frames_of), *[changed(valid)] * 6, frames, headers)


def frames_of(message: Message) -> Frames:
    """Return the frames of a message as bytes."""
    return [bytes(frame) for frame in protocol.encode(message)]


frames = st.lists(st.binary(max_size=300), max_size=6)
_entries = st.dictionaries(st.sampled_from(["kind", "id", "timeout_s", "arrays", "error", "info", "x"]), values)
headers = st.builds(
    lambda header, frames: [pack(header), *frames],
    one_of(values, _entries.map(lambda entries: {"v": PROTOCOL_VERSION, **entries})),
    st.lists(st.binary(max_size=50), max_size=3),
)


def header_of(frames: Frames) -> dict[Any, Any]:
    """Return the header of a message, empty if it cannot be read."""
    with suppress(ValueError, msgpack.UnpackException, RecursionError):
        header = msgpack.unpackb(frames[0] if frames else b"")
        return header if isinstance(header, dict) else {}
    return {}


def readdressed(frames: Frames, request_id: int) -> Frames:
    """Return a message with another request id if its id is ``OPEN_ID``. Other messages are not changed."""
    header = header_of(frames)
    return [pack(header | {"id": request_id}), *frames[1:]] if header.get("id") == OPEN_ID else frames


def pack(value: Any) -> bytes:
    """Return the msgpack bytes of a value, empty if it has none."""
    try:
        packed = bytes(msgpack.packb(value))
    except (ValueError, OverflowError, TypeError, RecursionError):
        return b""
    for placeholder, deep in _DEEP.items():
        packed = packed.replace(msgpack.packb(placeholder), deep)
    return packed


# --- changes ----------------------------------------------------------------------------------------------------------

Change = Callable[[DrawFn, Frames], Frames]


@st.composite
def _changed(draw: DrawFn, inputs: SearchStrategy[Frames], changes: list[Change]) -> Frames:
    frames = draw(inputs)
    for _ in range(draw(st.integers(1, 3))):
        longer = _pick(draw, changes)(draw, list(frames)) if frames else frames
        frames = longer if sum(map(len, longer)) <= MAX_INPUT_BYTES else frames
    return frames


def _pick(draw: DrawFn, items: Sequence[Any]) -> Any:
    return items[draw(st.integers(0, len(items) - 1))]  # faster than a new strategy for each list


def _change_frames(draw: DrawFn, frames: Frames) -> Frames:
    """Drop, repeat, exchange or add a frame."""
    places = range(len(frames))
    i, j, what = _pick(draw, places), _pick(draw, places), _pick(draw, ["drop", "repeat", "swap", "add"])
    if what == "drop":
        del frames[i]
    elif what == "repeat":
        frames[i:i] = [frames[j]] * _pick(draw, [1, 2, 60])
    elif what == "swap":
        frames[i], frames[j] = frames[j], frames[i]
    else:
        frames.insert(i, _pick(draw, _PIECES))
    return frames


def _change_bytes(draw: DrawFn, frames: Frames) -> Frames:
    """Flip a bit, or insert, overwrite, repeat or cut bytes of a frame, half of the times of the first one."""
    i = _pick(draw, [*[0] * len(frames), *range(len(frames))])
    start = draw(st.integers(0, len(frames[i])))
    end = start + _pick(draw, [0, 1, 1, 2, 4, 8, MAX_INPUT_BYTES])
    before, part, after = frames[i][:start], frames[i][start:end], frames[i][end:]
    flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in part[:1]) + part[1:]
    repeated = part * (1000 if len(part) <= 8 else 2)
    frames[i] = before + _pick(draw, [flipped, flipped, part * 2, repeated, *_PIECES, draw(_few_bytes)]) + after
    return frames


_few_bytes = st.binary(max_size=8)


def _change_header(draw: DrawFn, frames: Frames) -> Frames:
    """Change an entry of the header. Another version or kind is rare, because nothing else is read then."""
    header = header_of(frames)
    kept = {key: header.pop(key) for key in ("v", "kind") if key in header and draw(st.integers(0, 9))}
    if header:
        _change_tree(draw, header, values)
        frames[0] = pack(kept | header) or frames[0]
    return frames


def _change_text(draw: DrawFn, frames: Frames) -> Frames:
    """Change the JSON text of an array, and its announced size with it."""
    try:
        content = json.loads(frames[1])
        _change_tree(draw, content, json_values)
        return with_text(frames, json.dumps(content).encode())
    except (ValueError, IndexError, RecursionError):
        return _change_header(draw, frames)


def with_text(frames: Frames, text: bytes) -> Frames:
    """Return a message with another text as its only array."""
    return [pack(header_of(frames) | {"arrays": [["u1", len(text)]]}), text]


def _resize_array(draw: DrawFn, frames: Frames) -> Frames:
    """Change the announced shape of an array, and the array with it if it does not become too large."""
    header = header_of(frames)
    specs = header.get("arrays")
    if not isinstance(specs, list) or len(specs) != len(frames) - 1 or not specs:
        return _change_header(draw, frames)
    i, code = _pick(draw, range(len(specs))), _pick(draw, [*_ITEM_BYTES])
    shape = [_pick(draw, SIZES) for _ in range(_pick(draw, [1, 2]))]
    specs[i] = [code, *shape]
    if (n_bytes := math.prod(shape) * _ITEM_BYTES[code]) <= MAX_INPUT_BYTES:
        frames[i + 1] = bytes([draw(st.integers(0, 255))]) * n_bytes
    return [pack(header), *frames[1:]]


def _change_tree(draw: DrawFn, root: Any, values: SearchStrategy[Any]) -> None:
    """Replace, vary, remove or add one entry of nested maps and lists."""
    node, key = root, None
    while (child := root if key is None else node[key]) and isinstance(child, dict | list):
        if key is not None and draw(st.booleans()):
            break
        node = child
        key = _pick(draw, [*node] if isinstance(node, dict) else range(len(node)))
    if key is None:
        return
    what = _pick(draw, ["replace", "vary", "vary", "replace", "add", "remove"])
    if what == "replace":
        node[key] = draw(values)
    elif what == "vary":
        node[key] = _pick(draw, _near(node[key]))
    elif what == "remove":
        del node[key]
    elif isinstance(node, dict):
        node[_pick(draw, ["id", "x", "kind", "v", "arrays", "message"])] = node[key]
    else:
        node.insert(key, node[key])


def _near(value: Any) -> list[Any]:
    """Return values of the same type: near ones, and extreme ones."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, -value, value * 1e9, value * 2]
    if isinstance(value, str):
        return [value * 2, value * (1000 if len(value) < 100 else 2), value[:-1], value + "\ud7ff", value.upper()]
    if isinstance(value, list):
        return [value * 2, value[:-1], value[::-1], [value], value * (5000 if len(value) == 1 else 2)]
    return [[value]]
