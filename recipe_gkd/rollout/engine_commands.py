"""Queue of commands for an engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from recipe_gkd.errors import GkdError

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine

Command = Callable[["LLMEngine"], Any]


class CommandQueue:
    """Commands for an engine's thread, each with a future for its result. All methods are safe in any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Command, Future[Any]]] = queue.SimpleQueue()
        self._current: Future[Any] = Future()  # future of the current or the last command

    def put(self, command: Command) -> Future[Any]:
        """Add a command, and return the future of its result."""
        done: Future[Any] = Future()
        self._queue.put((command, done))
        return done

    def wake(self) -> None:
        """End the wait of a thread that iterates :meth:`take`."""
        self.put(lambda _: None)

    def take(self, *, wait: bool) -> Iterator[tuple[Command, Future[Any]]]:
        """Yield the queued commands that were not canceled.

        Args:
            wait: If True, wait for a first command.
        """
        while True:
            try:
                command, done = self._queue.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if done.set_running_or_notify_cancel():
                self._current = done
                yield command, done

    def fail_all(self, failure: GkdError) -> None:
        """Fail all queued commands, and the current one, each with a copy of ``failure``."""
        self.fail_queued(failure)
        settle(self._current, error=failure.located())

    def fail_queued(self, failure: GkdError) -> None:
        """Fail all queued commands, each with a copy of ``failure``."""
        while True:
            try:
                _, done = self._queue.get_nowait()
            except queue.Empty:
                return
            if done.set_running_or_notify_cancel():
                done.set_exception(failure.located())


def settle(done: Future[Any], *, result: object = None, error: BaseException | None = None) -> None:
    """Set a result or an error, unless the future has one: two threads may try to when an engine fails."""
    with suppress(InvalidStateError):
        done.set_result(result) if error is None else done.set_exception(error)
