"""Which sequences are inside the engine, and which wait before it: what is inside can always run to its end.

vLLM lets a sequence in as soon as the KV blocks for all of it are free, but does not set them aside: several that are
half done then take them from each other (a preempted one starts again from its first token), and it counts no host
memory at all. Here a sequence goes in when what it needs at most fits beside what those inside need at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from teacher.records import TeacherSequence


@dataclass(frozen=True)
class Need:
    """Of one sequence, at its end; or what there is for all."""

    kv_blocks: int
    answer_bytes: int

    def __add__(self, other: Need) -> Need:
        return Need(self.kv_blocks + other.kv_blocks, self.answer_bytes + other.answer_bytes)

    def __sub__(self, other: Need) -> Need:
        return Need(self.kv_blocks - other.kv_blocks, self.answer_bytes - other.answer_bytes)

    def fits(self, room: Need) -> bool:
        return self.kv_blocks <= room.kv_blocks and self.answer_bytes <= room.answer_bytes


class Admission:
    """First come, first served: nobody passes a sequence that waits for room, so none waits for ever."""

    def __init__(self, room: Need) -> None:
        self._free = room
        self._inside: dict[int, Need] = {}
        self._waiting: deque[tuple[int, TeacherSequence, Need]] = deque()

    def queue(self, key: int, sequence: TeacherSequence, need: Need) -> None:
        self._waiting.append((key, sequence, need))

    def admit(self) -> tuple[int, TeacherSequence] | None:
        """The next one that goes in now. One alone always does: whoever queues it has refused what cannot fit."""
        if not self._waiting or (self._inside and not self._waiting[0][2].fits(self._free)):
            return None
        key, sequence, need = self._waiting.popleft()
        self._inside[key] = need
        self._free -= need
        return key, sequence

    def leave(self, key: int) -> None:
        """A sequence that was inside is done."""
        self._free += self._inside.pop(key)

    def discard(self, keys: Iterable[int]) -> list[int]:
        """Forget those; returns which of them were inside."""
        gone = set(keys)
        self._waiting = deque(item for item in self._waiting if item[0] not in gone)
        inside = [key for key in gone if key in self._inside]
        for key in inside:
            self.leave(key)
        return inside
