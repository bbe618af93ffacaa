"""Mutations of messages: of their frames, of their msgpack headers and JSON texts, and of single bytes."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from fuzzing.targets import Frames

MAX_INPUT_BYTES = 1 << 20
_MAX_FRAMES = 64
_ITEM_BYTES = {"i4": 4, "f4": 4, "f2": 2, "u1": 1}


def nested(depth: int, value: Any = None) -> Any:
    """Return ``value`` inside of ``depth`` lists."""
    for _ in range(depth):
        value = [value]
    return value


_DEEP_LIST, _DEEP_MAP = "<list>", "<map>"
_DEEPER_THAN_PACKB = {  # msgpack unpacks 1024 levels, which is more than Python's recursion limit, but packs only 511
    bytes(msgpack.packb(_DEEP_LIST)): b"\x91" * 1005 + b"\xc0",
    bytes(msgpack.packb(_DEEP_MAP)): b"\x81\xa1a" * 1005 + b"\xc0",
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 2**15, 2**16, 2**24, 2**24 + 1),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1e-6, 1e6, 1e308, 604800.0, math.inf, -math.inf, math.nan),
    *("", "x", "\0", "\n", "\x7f", "\u202e", "\U0001f600", "score", "float16", "float32", "i4", "u1", "9" * 5000),
    *("x" * 16384, "x" * 16385, "\U0001f600" * 16384, "\x01" * 16384, "sequence 0: ", "sequence 1: ", "%s%n{0}"),
    *(b"", b"\xff", b"x" * 300, [], [[]], {}, [0], [1, 2, 3], ["i4", 1], ["f4", 2, 2], ["u1", 0], {"id": 1}),
    *(
        msgpack.ExtType(1, b""),
        msgpack.ExtType(5, b"abc"),
        msgpack.Timestamp(1, 2),
        nested(20),
        nested(300),
        _DEEP_LIST,
        _DEEP_MAP,
    ),
    *([0] * 12289, [0] * 12290, {str(i): i for i in range(40)}),
]
JSON_VALUES: list[Any] = [
    value for value in VALUES if isinstance(value, None | bool | int | float | str | list | dict)
] + [
    10**400,
    -(10**400),
    10**4000,
    nested(900),
]
BYTES = [
    *(b"", b"\0", b"\xff" * 4, b"\0" * 4, b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xd9\xff", b"\xdc\xff\xff"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xcb\x7f\xf8" + bytes(6), b"\xca\x7f\x80\0\0", b"\xc9\0\0\0\x10", b"\xd6\xff\0\0\0\0", b"\x91" * 600),
    *(b"\x81\xa0" * 300, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xed\xa0\x80", b"\r\n", b" ", b":", b"%00", b"[" * 2000),
]


class Mutator:
    """Source of mutated inputs.

    Args:
        rng: Random numbers.
        is_message: True if the first frame is a msgpack header.
        words: Further byte strings to insert.
    """

    def __init__(self, rng: random.Random, *, is_message: bool, words: Sequence[bytes] = ()) -> None:
        self._rng, self._is_message = rng, is_message
        self._words = [*BYTES, *words]
        by_bytes = [self._flip, self._cut, self._insert, self._overwrite, self._repeat, self._grow]
        by_frames = [self._drop, self._double, self._swap, self._add, self._splice]
        self._other: Frames = []
        self._kinds: list[Callable[[Frames], Frames]] = [*by_bytes, *by_frames]
        if is_message:
            self._kinds += [self._change_header] * 12 + [self._change_json] * 3 + [self._resize_array] * 2

    def mutate(self, frames: Frames, other: Frames) -> Frames:
        """Return a changed copy of an input.

        Args:
            frames: Input.
            other: Another input, of which parts may be taken.
        """
        self._other = other
        result = list(frames)
        n_changes = 1 + min(6, int(self._rng.expovariate(1.0)))
        for _ in range(n_changes):
            changed = self._rng.choice(self._kinds)(list(result))
            if sum(map(len, changed)) <= MAX_INPUT_BYTES and len(changed) <= _MAX_FRAMES:
                result = changed
        return result

    # --- frames ---

    def _index(self, frames: Frames) -> int:
        return self._rng.randrange(len(frames))

    def _drop(self, frames: Frames) -> Frames:
        if frames:
            del frames[self._index(frames)]
        return frames

    def _double(self, frames: Frames) -> Frames:
        if frames:
            frames.insert(self._index(frames), self._rng.choice(frames))
        return frames

    def _swap(self, frames: Frames) -> Frames:
        if frames:
            i, j = self._index(frames), self._index(frames)
            frames[i], frames[j] = frames[j], frames[i]
        return frames

    def _add(self, frames: Frames) -> Frames:
        frames.insert(self._rng.randint(0, len(frames)), self._rng.choice(self._words))
        return frames

    def _splice(self, frames: Frames) -> Frames:
        return frames[: self._rng.randint(0, len(frames))] + self._other[self._rng.randint(0, len(self._other)) :]

    # --- bytes ---

    def _edit(self, frames: Frames, change: Callable[[bytes, int], bytes]) -> Frames:
        """Replace one frame, preferably the first."""
        if frames:
            i = 0 if self._rng.random() < 0.5 else self._index(frames)
            frames[i] = change(frames[i], self._rng.randint(0, len(frames[i])))
        return frames

    def _flip(self, frames: Frames) -> Frames:
        bit = 1 << self._rng.randrange(8)

        def flip(data: bytes, at: int) -> bytes:
            return data[:at] + bytes(byte ^ bit for byte in data[at : at + 1]) + data[at + 1 :]

        return self._edit(frames, flip)

    def _cut(self, frames: Frames) -> Frames:
        length = self._rng.choice([1, 2, 4, 8, 1 << 20])
        return self._edit(frames, lambda data, at: data[:at] + data[at + length :])

    def _insert(self, frames: Frames) -> Frames:
        word = self._rng.choice(self._words)
        return self._edit(frames, lambda data, at: data[:at] + word + data[at:])

    def _overwrite(self, frames: Frames) -> Frames:
        word = self._rng.choice([*self._words, self._rng.randbytes(self._rng.choice([1, 2, 4, 8]))])
        return self._edit(frames, lambda data, at: data[:at] + word + data[at + len(word) :])

    def _repeat(self, frames: Frames) -> Frames:
        n_times, length = self._rng.choice([2, 3, 10, 1000, 6000]), self._rng.choice([1, 1, 2, 4, 8])
        return self._edit(frames, lambda data, at: data[:at] + data[at : at + length] * n_times + data[at + length :])

    def _grow(self, frames: Frames) -> Frames:
        # Bytes below ZeroMQ: zeros are messages of two bytes, and many of them only take time.
        n_bytes = self._rng.choice([1, 3, 4, 64, 4096, 70_000] if self._is_message else [1, 3, 4, 64, 512, 1024])
        return self._edit(frames, lambda data, at: data + bytes(n_bytes))

    # --- structure ---

    def _change_header(self, frames: Frames) -> Frames:
        header = _unpack(frames[0]) if frames else None
        if not isinstance(header, dict):
            return frames
        self._change_tree(header, VALUES, _unpack(self._other[0]) if self._other else None)
        packed = _pack(header)
        return [packed, *frames[1:]] if packed is not None else frames

    def _change_json(self, frames: Frames) -> Frames:
        """Change the JSON text of an array, and the announced size with it."""
        header = _unpack(frames[0]) if frames else None
        if not isinstance(header, dict) or header.get("kind") != "status" or len(frames) != 2:
            return self._change_header(frames)
        try:
            content = json.loads(frames[1])
            self._change_tree(content, JSON_VALUES, None)
            text = json.dumps(content).encode()
        except (ValueError, RecursionError):
            return frames
        header["arrays"] = [["u1", len(text)]]
        packed = _pack(header)
        return [packed, text] if packed is not None else frames

    def _resize_array(self, frames: Frames) -> Frames:
        """Change an array and its announced shape together, so that they still agree."""
        header = _unpack(frames[0]) if frames else None
        specs = header.get("arrays") if isinstance(header, dict) else None
        if not isinstance(specs, list) or len(frames) < 2 or len(specs) != len(frames) - 1:
            return self._change_header(frames)
        i = self._rng.randrange(len(specs))
        code = self._rng.choice([*_ITEM_BYTES])
        shape = [self._rng.choice([1, 1, 2, 3, 5, 64, 1000]) for _ in range(self._rng.randint(1, 2))]
        fill = self._rng.choice([b"\0", b"\xff", b"\x7f", b"\x01", self._rng.randbytes(1)])
        specs[i] = [code, *shape]
        frames[i + 1] = fill * (math.prod(shape) * _ITEM_BYTES[code])
        packed = _pack(header)
        return [packed, *frames[1:]] if packed is not None else frames

    def _change_tree(self, root: Any, values: list[Any], donor: Any) -> None:
        """Change one entry of nested maps and lists."""
        node = root
        while (entries := _keys(node)) and self._rng.random() < 0.6:
            child = node[self._rng.choice(entries)]
            if not isinstance(child, dict | list) or not child:
                break
            node = child
        if not (entries := _keys(node)):
            return
        key, kind = self._rng.choice(entries), self._rng.random()
        if kind < 0.6:
            node[key] = self._rng.choice(values)
        elif kind < 0.8:
            node[key] = self._vary(node[key])
        elif kind < 0.86:
            del node[key]
        elif kind < 0.93 and isinstance(donor, dict) and donor:
            name = self._rng.choice(list(donor))
            node[name if isinstance(node, dict) else key] = donor[name]
        elif isinstance(node, list):
            node.insert(key, node[self._rng.randrange(len(node))])
        else:
            node[self._rng.choice(["id", "x", "kind", "v", "arrays", "message"])] = node[key]

    def _vary(self, value: Any) -> Any:
        """Return a value near to ``value``, or an extreme one of the same type."""
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + self._rng.choice([-1, 1, 2, 100, -value, -2 * value])
        if isinstance(value, float):
            return self._rng.choice([-value, value * 1e9, value / 1e9, math.nan, math.inf])
        if isinstance(value, str):
            changed = self._change_number(value)
            return self._rng.choice(
                [changed, changed, value * 2, value * _times(value, 1000), value[:-1], value + "\ud7ff", value.upper()]
            )
        if isinstance(value, list):
            return self._rng.choice([value * 2, value[:-1], value[::-1], [value], value * _times(value, 5000)])
        return [value]

    def _change_number(self, text: str) -> str:
        """Replace one number in a text by a long or an unusual one."""
        if not (numbers := list(re.finditer(r"\d+", text))):
            return text
        start, end = self._rng.choice(numbers).span()
        return text[:start] + self._rng.choice(["9" * 20, "9" * 5000, "-1", "\u0663", ""]) + text[end:]


def _keys(node: Any) -> list[Any]:
    return list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []


def _times(value: str | list[Any], n_times: int) -> int:
    """Return ``n_times``, or 1 if ``value`` would become larger than an input may be."""
    n_bytes = len(_pack(value) or bytes(MAX_INPUT_BYTES))
    return n_times if n_bytes * n_times <= MAX_INPUT_BYTES else 1


def _unpack(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError):
        return None


def _pack(value: Any) -> bytes | None:
    try:
        packed = bytes(msgpack.packb(value))
    except (ValueError, OverflowError, TypeError, RecursionError):
        return None
    for marker, deep in _DEEPER_THAN_PACKB.items():
        packed = packed.replace(marker, deep)
    return packed


def set_request_id(frames: Frames, from_id: int, to_id: int) -> Frames:
    """Return a message with another request id. Messages without a readable header or with other ids are unchanged."""
    header = _unpack(frames[0]) if frames else None
    if not isinstance(header, dict) or header.get("id") != from_id:
        return frames
    packed = _pack(header | {"id": to_id})
    return [packed, *frames[1:]] if packed is not None else frames
