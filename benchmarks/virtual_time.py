"""An asyncio event loop whose clock jumps to the next timer: hours of a schedule in milliseconds, exact and repeatable.

For code that takes its times from ``asyncio.get_running_loop().time()`` and waits for nothing but timers and itself.
The tests find this module through ``pythonpath`` in ``setup.cfg``.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits, and no timer will wake one."""


class _Selector(selectors.DefaultSelector):
    """Does not sleep for a timeout: adds it to its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits, and no timer will wake one; threads and sockets are not waited for")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """As :func:`asyncio.run`, in virtual time; a program that would wait for ever raises :class:`Deadlock`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
