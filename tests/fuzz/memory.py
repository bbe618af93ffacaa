"""Memory that the handling of one message allocates and keeps. Hypothesis's own memory is not counted."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from teacher.wire.limits import LIMITS
from tests.fuzz.hostile import Frames

_SPARE_KEPT_BYTES = 16 << 10
_MAX_COUNTED_BYTES = 4 << 10  # a table that grows once is no leak of each message
_MAX_KEPT_BYTES = 600
"""Memory that a message may leave, on average: the interpreter's tables, and the frames of a suppressed error."""


@dataclass
class Allocations:
    """Allocations of the messages of a test.

    Attributes:
        spare_bytes: Memory that a message of any size may need. A receiver packs messages, each in a buffer of 256 kB.
        n_messages: Number of messages.
        kept_bytes: Memory that they left.
    """

    spare_bytes: int = 256 << 10
    n_messages: int = 0
    kept_bytes: int = 0

    @contextmanager
    def of(self, frames: Frames) -> Iterator[None]:
        """Check that the block allocates no more than a message of this size may."""
        tracemalloc.start()
        try:
            yield
            gc.collect()  # errors can be part of a cycle
        finally:
            kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        n_bytes = sum(map(len, frames))
        is_allowed = peak_bytes < self.spare_bytes + allowed_bytes(n_bytes)
        assert is_allowed, f"a message of {n_bytes} bytes allocated {peak_bytes} bytes"
        self.n_messages += 1
        self.kept_bytes += min(kept_bytes, _MAX_COUNTED_BYTES)

    def check_growth(self) -> None:
        """Check that the messages left no memory behind."""
        assert self.kept_bytes < _SPARE_KEPT_BYTES + _MAX_KEPT_BYTES * self.n_messages, (
            f"{self.n_messages} messages left {self.kept_bytes} bytes"
        )


def allowed_bytes(n_bytes: int) -> int:
    """Return the memory that decoding a message of ``n_bytes`` may allocate.

    An empty list is one byte of msgpack, and 64 bytes in Python with its entry in the outer list. msgpack allocates a
    list with its announced length before it reads the items, for each of at most 512 nesting levels.
    """
    preallocated_list_bytes = 8 * min(512, n_bytes // 3) * min(n_bytes, LIMITS.frames)
    return 100 * n_bytes + preallocated_list_bytes


def growth_bytes(action: Callable[[], object], n_times: int) -> int:
    """Return the memory by which this process grows if an action is repeated, in bytes."""
    action()
    tracemalloc.start()
    try:
        action()
        gc.collect()
        before_bytes = tracemalloc.get_traced_memory()[0]
        for _ in range(n_times):
            action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before_bytes
    finally:
        tracemalloc.stop()
