"""Request to end a run between two steps, after a checkpoint is saved: by a signal, or at a time limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil

log = logging.getLogger(__name__)

T = TypeVar("T")


class StopRequest:
    """Request to save a checkpoint between steps and to end the run.

    Lifecycle::

        stop = StopRequest(save_before_s=3600)
        with stop.accepted(pipeline.drop):                        # the training loop
            async for batch in stop.until_requested(pipeline):
                ...                                               # one step
                await stop.unless_requested(validate())
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
        self._on_request: Callable[[], object] | None = None
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
        if self._on_request is not None:
            self._on_request()
        return True

    def withdraw(self) -> None:
        """Forget a request that came during the last step."""
        self.reason = None

    @contextmanager
    def accepted(self, on_request: Callable[[], object] | None = None) -> Iterator[None]:
        """Accept requests in the body, and make one at the time limit. Needs a running event loop.

        Args:
            on_request: Called in the event loop when a request is accepted, before any other task runs.
        """
        loop, timer = asyncio.get_running_loop(), None
        self._requested, self._on_request = loop.create_future(), on_request
        if self._save_before_s is not None:
            age_s = time.time() - psutil.Process().create_time()
            timer = loop.call_later(max(0.0, self._save_before_s - age_s), self.request, "trainer.save_before")
        try:
            yield
        finally:
            self._requested = self._on_request = None
            if timer is not None:
                timer.cancel()

    async def unless_requested(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T | None:
        """Await ``work``, and cancel it if the end of the run is requested meanwhile.

        Args:
            work: Coroutine, which is not started after an earlier request.
            timeout_s: Deadline of the end of canceled work. None: it has its own.

        Returns:
            Result of ``work``. None if the end of the run was requested first. Errors that ``work`` raises after a
            request are logged.
        """
        if self.reason is not None:
            work.close()
            return None
        task = asyncio.ensure_future(work)
        waited_for: list[asyncio.Future[Any]] = [task, *self._requests()]
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if self.reason is None:
                return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            log.warning("work that was canceled (%s) has not ended within %g s", self.reason, timeout_s)
        elif not task.cancelled() and (error := task.exception()) is not None:
            log.warning("work that was canceled (%s) failed: %s", self.reason, error)
        return None

    def _requests(self) -> list[asyncio.Future[None]]:
        """Return the future that a stop request resolves, in a list; empty while requests are not accepted."""
        return [self._requested] if self._requested is not None else []

    async def until_requested(self, items: AsyncIterable[T]) -> AsyncIterator[T]:
        """Yield ``items``, such as the batches of a pipeline, to the last one or until the end of the run is requested.

        A request during the wait for an item cancels the wait. The item is dropped, with an error that it raises.
        """
        source, no_item = aiter(items), object()
        item: asyncio.Future[Any] | None = None
        try:
            while self.reason is None:
                item = asyncio.ensure_future(anext(source, no_item))
                await asyncio.wait([item, *self._requests()], return_when=asyncio.FIRST_COMPLETED)
                if self.reason is not None or (value := item.result()) is no_item:
                    return
                yield value
        finally:
            if item is not None:
                item.cancel()
                with suppress(asyncio.CancelledError, Exception):  # raised by the source's own task too
                    await item
