"""Tasks that live as long as a block, of which the first failure leaves it as itself; cleanup that is not canceled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class FirstErrorTaskGroup:
    """An ``asyncio.TaskGroup`` that raises what came first, not a group, and cancels what its body leaves behind."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def __aenter__(self) -> FirstErrorTaskGroup:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._running:  # none, unless the body left early or a task has failed
            if not task.cancelling():  # a second cancellation would interrupt its cleanup
                task.cancel()
        try:
            await self._group.__aexit__(*error)
        except BaseExceptionGroup as group:
            raise _cause(error[1], group) from None


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even if the caller is canceled meanwhile; the cancellation is raised afterwards.

    For cleanup that is bounded by deadlines of its own.
    """
    task = asyncio.ensure_future(work)
    canceled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            canceled = error
        except BaseException:  # noqa: BLE001 - raised below, as the task's own
            break
    if canceled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is what the caller gets
        raise canceled
    return task.result()


def _cause(body: BaseException | None, group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What the body raised came first, unless it was only cancelled because a task had failed."""
    task = asyncio.current_task()
    cancelled_from_outside = task is not None and task.cancelling() > 0
    if body is not None and (cancelled_from_outside or not isinstance(body, asyncio.CancelledError)):
        return body
    return first_failure(group)


def first_failure(error: BaseException) -> BaseException:
    """Return the failure that came first in a group; the rest of the group are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
