"""Memory that the teachers' rows of unfinished batches use, and the limit above which no batch is dispatched."""

from __future__ import annotations

import logging

from teacher.common.sizes import GIB

log = logging.getLogger(__name__)


class RowMemory:
    """Bytes of the teachers' rows by batch, from its dispatch until it has been trained on.

    A batch that is not complete counts at least as much as the largest batch so far. Until the first is complete, there
    is only one. One batch is always allowed, however large it is, so that the run continues.

    Args:
        limit_bytes: Limit for all batches together. None: no limit.

    Attributes:
        n_delayed: Number of batches that had to wait for memory.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes, self.n_delayed = limit_bytes, 0
        self._bytes_of: dict[int, int] = {}
        self._incomplete: set[int] = set()
        self._largest: int | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows that have arrived and are still needed."""
        return sum(self._bytes_of.values())

    def begin(self, step: int) -> None:
        """Add a batch that is dispatched now."""
        self._bytes_of[step] = 0
        self._incomplete.add(step)

    def add(self, step: int, n_bytes: int) -> None:
        """Add rows of a batch."""
        self._bytes_of[step] += n_bytes

    def complete(self, step: int) -> None:
        """Record that all rows of a batch have arrived."""
        self._incomplete.discard(step)
        self._largest = max(self._largest or 0, self._bytes_of[step])

    def release(self, step: int) -> None:
        """Remove a batch that has been trained on."""
        self._bytes_of.pop(step, None)
        self._incomplete.discard(step)

    def has_room(self) -> bool:
        """Return True if another batch may be dispatched."""
        if self._limit_bytes is None or not self._bytes_of:
            return True
        if self._largest is None:
            return False
        expected = sum(max(n, self._largest) if step in self._incomplete else n for step, n in self._bytes_of.items())
        return expected + self._largest <= self._limit_bytes

    def note_delay(self, step: int) -> None:
        """Report the first batch that has to wait for memory."""
        if self._largest is None or self._limit_bytes is None:
            return
        self.n_delayed += 1
        if self.n_delayed == 1:
            log.warning(
                "step %d: its generation waits until fewer teacher rows are in memory: a batch has up to %.2f GB, and "
                "actor_rollout_ref.teacher.max_rows_gb allows %.2f GB for all batches; raise it (with a larger object "
                "store: ray start --object-store-memory), or request fewer rows per position: teacher.top_k",
                step, self._largest / GIB, self._limit_bytes / GIB,
            )  # fmt: skip
