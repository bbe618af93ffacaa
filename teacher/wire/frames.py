"""Framing of a message: one msgpack header, then one raw little-endian frame for each array that it announces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from teacher.errors import TeacherProtocolError, short
from teacher.wire.limits import LIMITS

Header = dict[str, Any]

Frame = Any
"""An object with the buffer protocol: bytes, memoryview or zmq.Frame."""

_DTYPES = {code: np.dtype(f"<{code}") for code in ("i4", "f4", "f2", "u1")}
_MAX_HEADER_KEYS = 32
_MAX_KEY_CHARS = 1024


def pack(header: Header, arrays: Sequence[np.ndarray]) -> list[Frame]:
    """Return the frames of a message. Contiguous little-endian arrays are not copied.

    Args:
        header: Header without the entry ``arrays``, which is added.
        arrays: Arrays of dtype int32, float32, float16 or uint8.
    """
    specs, frames = [], []
    for array in arrays:
        code = f"{array.dtype.kind}{array.dtype.itemsize}"
        array = np.ascontiguousarray(array, dtype=_DTYPES[code])
        specs.append([code, *array.shape])
        frames.append(array.data.cast("B") if array.size else b"")
    return [msgpack.packb(header | {"arrays": specs}), *frames]


def unpack_header(frame: Frame) -> Header:
    """Return the decoded header.

    Raises:
        TeacherProtocolError: The frame is too large, is not msgpack, or is not a map.
    """
    data = memoryview(frame)
    if data.nbytes > LIMITS.header_bytes:
        raise TeacherProtocolError(f"header of {data.nbytes} bytes, at most {LIMITS.header_bytes} are allowed")
    try:
        # By default msgpack allocates a nested array for every announced count up to the length of the data, once for
        # each nesting level. The explicit limits bound that.
        header = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_array_len=min(LIMITS.frames, data.nbytes),  # each entry takes at least one byte
            max_map_len=_MAX_HEADER_KEYS,
            max_str_len=4 * LIMITS.text_chars,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise TeacherProtocolError(f"header is no msgpack: {short(error)}") from None
    if not isinstance(header, dict):
        raise TeacherProtocolError(f"header must be a map, got {type(header).__name__}")
    return header


def expect_keys(header: Header, allowed: frozenset[str]) -> None:
    """Check that a header, or another map, has no other keys than the allowed ones.

    Raises:
        TeacherProtocolError: It has.
    """
    if unknown := set(header) - allowed:
        names = sorted(map(str, unknown))
        raise TeacherProtocolError(
            f"unknown keys {short(names)}, expected {sorted(allowed)} only", entry=names[0][:_MAX_KEY_CHARS]
        )


def unpack_arrays(header: Header, frames: Sequence[Frame]) -> list[np.ndarray]:
    """Return the arrays of a message as views of their frames.

    Raises:
        TeacherProtocolError: Header and frames do not agree in number, dtype or size.
    """
    specs = header.get("arrays")
    if not isinstance(specs, list) or len(specs) != len(frames):
        n_specs = len(specs) if isinstance(specs, list) else short(specs)
        raise TeacherProtocolError(
            f"header announces {n_specs} arrays, {len(frames)} array frames arrived", entry="arrays"
        )
    return [_decode_array(spec, frame) for spec, frame in zip(specs, frames, strict=True)]


def _decode_array(spec: Any, frame: Frame) -> np.ndarray:
    if not isinstance(spec, list) or not 2 <= len(spec) <= 3 or not isinstance(spec[0], str) or spec[0] not in _DTYPES:
        raise TeacherProtocolError(
            f"array must be announced as [dtype, size(, size)], got {short(spec)}", entry="arrays"
        )
    dtype, shape = _DTYPES[spec[0]], spec[1:]
    announced_bytes = dtype.itemsize
    for smallest, size in enumerate(reversed(shape), 2 - len(shape)):  # an array of rows may have no columns
        if type(size) is not int or not smallest <= size <= LIMITS.vocab_size:
            raise TeacherProtocolError(
                f"array sizes must be 1 to {LIMITS.vocab_size}, or 0 columns, got {short(shape)}", entry="arrays"
            )
        announced_bytes *= size
    if (n_bytes := memoryview(frame).nbytes) != announced_bytes:
        raise TeacherProtocolError(f"array announced as {short(spec)} arrived with {n_bytes} bytes", entry="arrays")
    return np.ndarray(shape, dtype, frame)
