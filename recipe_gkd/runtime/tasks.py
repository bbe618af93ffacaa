"""Task group that raises its first error, and cleanup that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class FirstErrorTaskGroup:
    """An ``asyncio.TaskGroup`` that raises its first error instead of an exception group.

    Tasks that still run when the body ends are canceled.

    Example::

        async with FirstErrorTaskGroup() as tasks:
            result = await tasks.start(work())
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` as a task of the group."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def __aenter__(self) -> FirstErrorTaskGroup:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._running:  # empty, unless the body ended early or a task has failed
            if not task.cancelling():  # a second cancellation would interrupt its cleanup
                task.cancel()
        try:
            await self._group.__aexit__(*error)
        except BaseExceptionGroup as group:
            first = _cause(error[1], group)
            raise first from first.__cause__  # without the group as its context


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end, even if the caller is canceled. The cancellation is raised afterwards.

    Use it for cleanup that has deadlines of its own.
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
