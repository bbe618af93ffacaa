"""Marks of the conversations whose code a process executes, for the driver that reads them after its end.

This file imports only the standard library, because the process loads it by its path.
"""

from __future__ import annotations

import contextvars
import mmap
import queue
from collections.abc import Callable, Coroutine, Generator
from typing import Any

NO_KEY = -1

CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("conversation", default=NO_KEY)
"""Key of the conversation that a task or a thread works for."""


class Marks:
    """Keys of the conversations whose code is being executed: of the event loop, then of each thread."""

    def __init__(self, descriptor: int) -> None:
        self._keys = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(1, len(self._keys)):
            self._free.put(slot)

    @property
    def n_threads(self) -> int:
        """Number of threads that can be marked."""
        return len(self._keys) - 1

    def set_loop(self, key: int) -> None:
        """Mark the conversation of the event loop."""
        self._keys[0] = key

    def run_marked(self, function: Callable[[], Any]) -> Any:
        """Call a function in this thread, with the mark of its conversation."""
        slot = self._free.get()
        self._keys[slot] = CURRENT.get()
        try:
            return function()
        finally:
            self._keys[slot] = NO_KEY
            self._free.put(slot)


class MarkedCoroutine(Coroutine[Any, Any, Any]):
    """Coroutine of a task that marks its conversation whenever it runs."""

    def __init__(self, inner: Coroutine[Any, Any, Any], marks: Marks) -> None:
        self._inner, self._marks = inner, marks

    def send(self, value: Any) -> Any:
        """Continue the coroutine."""
        return self._marked(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine."""
        return self._marked(self._inner.throw, *error)

    def close(self) -> None:
        """Close the coroutine."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def _marked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._marks.set_loop(CURRENT.get())
        try:
            return function(*arguments)
        finally:
            self._marks.set_loop(NO_KEY)
