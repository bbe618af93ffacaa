"""Progress of the start of the workers in the log: a line at each change, and at least one every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

REPEAT_S = 10.0
"""Time after which the same state is logged again."""
MIN_INTERVAL_S = 1.0
"""Shortest time between two lines, so that a pool of many workers does not log a line for each."""


@dataclass
class _Pool:
    """State of one pool: what its workers do, and how many are done."""

    size: int
    activity: str
    started: float
    n_done: int = 0

    def __str__(self) -> str:
        if self.n_done == self.size:
            return f"{self.activity}: done"
        return f"{self.activity}: {self.n_done} of {self.size} done after {time.monotonic() - self.started:.0f} s"


class StartupProgress:
    """Log of the start of the workers. An async context manager that logs in the background.

    Example::

        async with StartupProgress() as progress:
            done = progress.begin("actor", 2, "starting processes")
            done(0); done(1)        # as each worker has finished this activity
    """

    def __init__(self, repeat_s: float = REPEAT_S, min_interval_s: float = MIN_INTERVAL_S) -> None:
        self._repeat_s, self._min_interval_s = repeat_s, min_interval_s
        self._pools: dict[str, _Pool] = {}
        self._began = time.monotonic()
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, pool: str, size: int, activity: str) -> Callable[[int], None]:
        """Record that all workers of a pool begin an activity.

        Args:
            size: Number of its workers.
            activity: What they do, such as ``"loading the model"``.

        Returns:
            Function to call with the rank of each worker that has finished the activity.
        """
        state = self._pools[pool] = _Pool(size, activity, time.monotonic())
        self._changed.set()

        def done(rank: int) -> None:
            state.n_done += 1
            self._changed.set()

        return done

    async def __aenter__(self) -> StartupProgress:
        self._task = asyncio.create_task(self._log_changes())
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        assert self._task is not None
        self._ended.set()
        self._changed.set()
        await self._task
        if error is None:
            log.info("start: all workers are ready after %.0f s", time.monotonic() - self._began)

    async def _log_changes(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._repeat_s)
            self._changed.clear()
            if self._pools and not self._ended.is_set():
                states = "; ".join(f"{name} workers {state}" for name, state in self._pools.items())
                log.info("start, %.0f s: %s", time.monotonic() - self._began, states)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._min_interval_s)
