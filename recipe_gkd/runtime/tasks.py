"""Task group that raises its first error, and cleanup that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from recipe_gkd.runtime.run_log import FILE_ONLY

log = logging.getLogger(__name__)

T = TypeVar("T")
ExitArguments = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]
"""Arguments of ``__aexit__``."""


class FirstErrorTaskGroup:
    """An ``asyncio.TaskGroup`` that raises its first error instead of an exception group.

    Tasks that still run when the body ends are canceled.

    Example::

        async with FirstErrorTaskGroup() as tasks:
            result = await tasks.start(work())
            ...
            tasks.drop()                        # optional: no result of a task is needed any more
            await tasks.drained(timeout_s=10)   # the body continues, whatever the tasks raised
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self._is_dropped = False

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` as a task of the group. After :meth:`drop` the task is canceled at once."""
        task = self._group.create_task(self._run(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # a task that was canceled before it started has not awaited it
        if self._is_dropped:
            task.cancel()
        return task

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except Exception as error:
            if not self._is_dropped:
                raise
            log.info("work that was dropped failed: %s: %s", type(error).__name__, error, extra=FILE_ONLY)
            raise asyncio.CancelledError from error

    def drop(self) -> None:
        """Cancel all tasks. From now on an error of a task is logged, and does not end the body."""
        self._is_dropped = True
        self._cancel_running()

    async def drained(self, timeout_s: float) -> None:
        """Wait after :meth:`drop` until all tasks have ended, at most ``timeout_s``."""
        if not self._running:
            return
        _, pending = await asyncio.wait(set(self._running), timeout=timeout_s)
        if pending:
            log.warning("%d tasks that were dropped have not ended within %g s", len(pending), timeout_s)

    def _cancel_running(self) -> None:
        for task in self._running:
            if not task.cancelling():  # a second cancellation would interrupt its cleanup
                task.cancel()

    async def __aenter__(self) -> FirstErrorTaskGroup:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: *ExitArguments) -> None:
        self._cancel_running()  # none, unless the body ended early or a task has failed
        try:
            await self._group.__aexit__(*error)
        except BaseExceptionGroup as group:
            first = _cause(error[1], group)
            raise first from first.__cause__  # without the group as its context


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end, even if the caller is canceled. The cancellation is raised afterwards.

    Use it for cleanup that has its own deadlines.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
        except BaseException:  # noqa: BLE001 - task.result() raises it
            break
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved, because the caller receives the cancellation
        raise cancellation
    return task.result()


def _cause(body: BaseException | None, group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error. The body's error is first, except for a cancellation caused by a failed task."""
    task = asyncio.current_task()
    canceled_from_outside = task is not None and task.cancelling() > 0
    if body is not None and (canceled_from_outside or not isinstance(body, asyncio.CancelledError)):
        return body
    return first_failure(group)


def first_failure(error: BaseException) -> BaseException:
    """Return the first error of an exception group. The other errors are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
