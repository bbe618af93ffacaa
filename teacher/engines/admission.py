"""Admission of sequences to the engine, so that every admitted sequence can finish without preemption.

vLLM admits a sequence as soon as the KV blocks for all of it are free, but does not reserve them. Several unfinished
sequences then take blocks from each other, and a preempted one starts again from its first token. vLLM does not count
host memory at all. Here a sequence is admitted when its maximum demand fits beside the maximum demands of the
sequences in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from teacher.records import TeacherSequence


@dataclass(frozen=True)
class Demand:
    """Maximum memory of one sequence, or the memory that exists for all sequences.

    Attributes:
        kv_blocks: Blocks of the KV cache.
        result_bytes: Host memory for results, in bytes.
    """

    kv_blocks: int
    result_bytes: int

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.kv_blocks + other.kv_blocks, self.result_bytes + other.result_bytes)

    def __sub__(self, other: Demand) -> Demand:
        return Demand(self.kv_blocks - other.kv_blocks, self.result_bytes - other.result_bytes)

    def fits(self, free: Demand) -> bool:
        """Return True if ``free`` covers this demand."""
        return self.kv_blocks <= free.kv_blocks and self.result_bytes <= free.result_bytes


class Admission:
    """First-come-first-served queue before the engine. No sequence overtakes another, so none starves."""

    def __init__(self, capacity: Demand) -> None:
        """Create an empty queue for an engine with this memory."""
        self._free = capacity
        self._admitted: dict[int, Demand] = {}
        self._waiting: deque[tuple[int, TeacherSequence, Demand]] = deque()

    def queue(self, key: int, sequence: TeacherSequence, demand: Demand) -> None:
        """Append a sequence to the queue."""
        self._waiting.append((key, sequence, demand))

    def admit(self) -> tuple[int, TeacherSequence] | None:
        """Admit and return the next sequence, or return None if it must wait or the queue is empty.

        If the engine is empty, the next sequence is always admitted. The caller rejects sequences that cannot fit.
        """
        if not self._waiting or (self._admitted and not self._waiting[0][2].fits(self._free)):
            return None
        key, sequence, demand = self._waiting.popleft()
        self._admitted[key] = demand
        self._free -= demand
        return key, sequence

    def release(self, key: int) -> None:
        """Free the memory of an admitted sequence that is done."""
        self._free += self._admitted.pop(key)

    def discard(self, keys: Iterable[int]) -> list[int]:
        """Remove sequences, and return the keys of admitted ones."""
        removed = set(keys)
        self._waiting = deque(item for item in self._waiting if item[0] not in removed)
        admitted = [key for key in removed if key in self._admitted]
        for key in admitted:
            self.release(key)
        return admitted
