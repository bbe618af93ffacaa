"""Asyncio event loop whose clock jumps to the next timer: hours of a schedule take milliseconds and are exact.

It runs code that reads the time of the event loop and waits only for timers and for its own tasks. Tests import this
module through ``pythonpath`` in ``pyproject.toml``.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Program whose tasks all wait while no timer is set."""


class _Selector(selectors.DefaultSelector):
    """A selector that adds each timeout to its clock instead of sleeping."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("all tasks wait and no timer is set; virtual time cannot wait for threads or sockets")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time, which starts at 0 s."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like :func:`asyncio.run`, in virtual time.

    Raises:
        Deadlock: The program would wait forever.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
