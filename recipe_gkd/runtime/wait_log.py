"""Log lines about waits of the driver that take long, so that a hang is not silent.

All waits of the driver for workers, teachers, reward functions, Ray and disks are registered here. A wait logs a line
after 30 s and then one per minute::

    weight sync v4, begin: waits 30 of 600 s (actor_rollout_ref.nccl_timeout) for rollout worker 0
    generate, step 4: waits 90 of 1800 s (actor_rollout_ref.rollout.timeout_s) for 12 responses of rollout worker 1

Waits of the same phase share a line. A phase that takes less than 30 s logs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from recipe_gkd.runtime.keyed_timeout import KeyedTimeout

log = logging.getLogger(__name__)

FIRST_LINE_S = 30.0
"""Age of a wait at its first line."""
REPEAT_S = 60.0
"""Time between two lines about a phase."""
MAX_NAMES = 4
"""Maximum number of names in a line."""

Missing = Callable[[], Mapping[str, int]]
"""Function that returns who is waited for, and the number of results that each of them still owes."""


@dataclass(frozen=True)
class _Wait:
    phase: str
    timeout_s: float | None
    missing: Missing
    unit: str
    started: float


class WaitLog:
    """Waits in progress, and the thread that logs them. The event loop may be blocked meanwhile.

    Example::

        with waits.waiting("save_checkpoint, step 4", timeout_s, lambda: {"actor worker 0": 1}):
            await reply

    Args:
        first_line_s: Age of a wait at its first line.
        repeat_s: Time between two lines about a phase.
    """

    def __init__(self, first_line_s: float = FIRST_LINE_S, repeat_s: float = REPEAT_S) -> None:
        self._first_line_s, self._repeat_s = first_line_s, repeat_s
        self._waits: dict[int, _Wait] = {}
        self._logged_at: dict[str, float] = {}  # by phase
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._next_id = 0

    @contextmanager
    def waiting(self, phase: str, timeout_s: float | None, missing: Missing, unit: str = "") -> Iterator[None]:
        """Register a wait while the body runs.

        Args:
            phase: Phase of the run, such as ``"update, step 4"``.
            timeout_s: Deadline in seconds after the start of the body. None: unlimited, or limited by others.
            missing: Function that returns who is waited for. It is called in another thread.
            unit: Name of the results that are counted, such as ``"responses"``. Empty: they are not counted.
        """
        wait = _Wait(phase, timeout_s, missing, unit, time.monotonic())
        with self._changed:
            number = self._next_id = self._next_id + 1
            self._waits[number] = wait
            self._start_thread()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._waits[number]
                if not any(other.phase == phase for other in self._waits.values()):
                    self._logged_at.pop(phase, None)

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._log_due, name="wait_log", daemon=True)
            self._thread.start()

    def _log_due(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._take_pause_s(time.monotonic()))
                due = self.take_due(time.monotonic())
            for waits in due:  # without the lock: a console can block
                log.info("%s", _line(waits))

    def _take_pause_s(self, now: float) -> float | None:
        """Return the time until the next line is due, None without a wait."""
        due = [self._due_at(waits) for waits in self._by_phase().values()]
        return max(0.0, min(due) - now) if due else None

    def take_due(self, now: float) -> list[list[_Wait]]:
        """Return the waits of each phase whose line is due at ``now``, and take the line as logged."""
        due = [waits for waits in self._by_phase().values() if self._due_at(waits) <= now]
        self._logged_at |= {waits[0].phase: now for waits in due}
        return due

    def _due_at(self, waits: list[_Wait]) -> float:
        last = self._logged_at.get(waits[0].phase, float("-inf"))
        return max(waits[0].started + self._first_line_s, last + self._repeat_s)

    def _by_phase(self) -> dict[str, list[_Wait]]:
        """Return the waits of each phase, the oldest first."""
        found: dict[str, list[_Wait]] = {}
        for wait in self._waits.values():
            found.setdefault(wait.phase, []).append(wait)
        return found


def _line(waits: list[_Wait]) -> str:
    """Return the line about all waits of a phase. Age and deadline belong to the oldest."""
    oldest = waits[0]
    missing: dict[str, int] = {}
    for wait in waits:
        for name, count in wait.missing().items():
            missing[name] = missing.get(name, 0) + count
    names = [f"{count} {oldest.unit} of {name}" if oldest.unit else name for name, count in missing.items()]
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    age = f"{time.monotonic() - oldest.started:.0f}"
    if oldest.timeout_s is None:
        return f"{oldest.phase}: waits {age} s for {shown}"
    limit = f"{oldest.timeout_s:g} s"
    if isinstance(oldest.timeout_s, KeyedTimeout):
        limit = f"{oldest.timeout_s.without_margin_s:g} s ({oldest.timeout_s.origin})"
    return f"{oldest.phase}: waits {age} of {limit} for {shown}"


_waits = WaitLog()


def waiting(phase: str, timeout_s: float | None, missing: Missing, unit: str = "") -> AbstractContextManager[None]:
    """Register a wait of this process while the body runs; see :meth:`WaitLog.waiting`."""
    return _waits.waiting(phase, timeout_s, missing, unit)


def waiting_for(phase: str, timeout_s: float | None, name: str) -> AbstractContextManager[None]:
    """Register a wait for one process, disk or service while the body runs."""
    return waiting(phase, timeout_s, lambda: {name: 1})
