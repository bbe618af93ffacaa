"""Messages between the driver and a process with environments: a length, then a pickled object.

Both sides belong to the same run, as with multiprocessing. This file imports only the standard library, because the
process loads it by its path.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


def pack(message: object) -> bytes:
    """Return a message as bytes, with its length."""
    content = pickle.dumps(message)
    return _LENGTH.pack(len(content)) + content


def length_of(header: bytes) -> int:
    """Return the number of bytes that follow the first :data:`LENGTH_BYTES`."""
    return int(_LENGTH.unpack(header)[0])


def unpack(content: bytes) -> Any:
    """Return the message without its length."""
    return pickle.loads(content)


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError: The connection has ended. It is an EOFError.
    """
    return unpack(await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES))))
