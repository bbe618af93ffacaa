"""Request to end a run between two steps, after a checkpoint is saved: by a signal, or at a time limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil

log = logging.getLogger(__name__)

T = TypeVar("T")


class StopRequest:
    """Request to save a checkpoint between steps and to end the run.

    Lifecycle::

        stop = StopRequest(save_before_s=3600)
        with stop.accepted():                                     # the training loop
            async for batch in stop.until_requested(pipeline):
                ...                                               # one step
            if stop.reason is not None:
                ...                                               # save

    Args:
        save_before_s: Age of this process, in seconds, at which the request is made. None: no time limit.

    Attributes:
        reason: Cause of the request, such as ``"SIGTERM"``. None while there is no request.
    """

    def __init__(self, save_before_s: float | None = None) -> None:
        self._save_before_s = save_before_s
        self._requested: asyncio.Future[None] | None = None
        self.reason: str | None = None

    def request(self, reason: str) -> bool:
        """Request the end of the run.

        Returns:
            True if the run will save and end. False if no training loop accepts requests, or after an earlier request.
        """
        if self._requested is None or self.reason is not None:
            return False
        self.reason = reason
        self._requested.set_result(None)
        log.warning("%s: the run saves a checkpoint between steps and ends", reason)
        return True

    def withdraw(self) -> None:
        """Forget a request that came during the last step."""
        self.reason = None

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Accept requests in the body, and make one at the time limit. Needs a running event loop."""
        loop, timer = asyncio.get_running_loop(), None
        self._requested = loop.create_future()
        if self._save_before_s is not None:
            age_s = time.time() - psutil.Process().create_time()
            timer = loop.call_later(max(0.0, self._save_before_s - age_s), self.request, "trainer.save_before")
        try:
            yield
        finally:
            self._requested = None
            if timer is not None:
                timer.cancel()

    async def unless_requested(self, work: Coroutine[Any, Any, object]) -> None:
        """Await ``work``, and cancel it if the end of the run is requested meanwhile. Its own error is raised."""
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, *self._requests()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _requests(self) -> list[asyncio.Future[None]]:
        """Return what completes with the request, if one is accepted now."""
        return [self._requested] if self._requested is not None else []

    async def until_requested(self, items: AsyncIterable[T], *, interrupt: bool = True) -> AsyncIterator[T]:
        """Yield from ``items`` until the end of the run is requested, or to their end.

        Args:
            items: Source, such as the batches of a pipeline.
            interrupt: Cancel the wait for the next item. False: yield one more item after a request during a wait.
        """
        source, no_item = aiter(items), object()
        waited_for: list[asyncio.Future[Any]] = [*self._requests()] if interrupt else []
        item: asyncio.Future[Any] | None = None
        try:
            while self.reason is None:
                item = asyncio.ensure_future(anext(source, no_item))
                await asyncio.wait([item, *waited_for], return_when=asyncio.FIRST_COMPLETED)
                if not item.done() or (value := item.result()) is no_item:
                    return
                yield value
        finally:
            if item is not None:
                item.cancel()
                with suppress(asyncio.CancelledError, Exception):  # raised by the source's own task too
                    await item
