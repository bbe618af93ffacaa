"""Replacement of all actor ranks after one was lost, with a limit on the number of restarts."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from recipe_gkd.errors import GkdError, WorkerDied, find_timeout_error
from recipe_gkd.ray_cluster.new_workers import set_up_in_new_processes
from recipe_gkd.ray_cluster.node_probe import kill_workers
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime.run_log import as_event

log = logging.getLogger(__name__)
T = TypeVar("T")
W = TypeVar("W")

KILL_TIMEOUT_S = 5.0
"""Deadline of the end of the old ranks' processes."""
LOST_NODE_NOTICE_S = 40.0
"""Time in which Ray notices that a node is lost. Until then it starts workers there, which die."""


class ActorRestarts(Generic[W, T]):
    """Starts all actor ranks again after one was lost, at most ``trainer.max_actor_restarts`` times in a run.

    A rank is lost if its process has ended, or if it did not answer before a deadline. The others cannot go on without
    it, because they share the model, the gradients or the states of the optimizer with it. New ranks that die within
    :data:`LOST_NODE_NOTICE_S` of a restart belong to the same restart, because Ray may start them on a lost node.

    Args:
        actors: Group whose workers are replaced.
        start: Function that starts a new worker of a rank and returns its handle.
        allowed: Maximum number of restarts. 0: none, for ranks that share their devices with other models.
        save_state: Saves the state of all workers because of an error, for a diagnosis, and returns its folder.

    Attributes:
        n_restarts: Number of restarts so far.
    """

    def __init__(
        self,
        actors: WorkerGroup[W],
        start: Callable[[int], Any],
        set_up: Callable[[], Awaitable[T]],
        *,
        allowed: int,
        save_state: Callable[[GkdError], Awaitable[object]],
    ) -> None:
        self.actors, self._start, self._set_up = actors, start, set_up
        self._allowed, self._save_state = allowed, save_state
        self.n_restarts = 0

    async def restart(self, error: GkdError) -> T:
        """Kill all ranks, start and set up new ones, and return the result of the set-up.

        Args:
            error: Error with which the training ended.

        Raises:
            GkdError: ``error`` itself if no rank was lost or no restart is left, or an error of the set-up.
        """
        counted_at = float("-inf")
        while True:
            is_same = time.monotonic() - counted_at < LOST_NODE_NOTICE_S
            await self._check(error, is_counted=is_same)
            if not is_same:
                self.n_restarts, counted_at = self.n_restarts + 1, time.monotonic()
            folder = await self._save_state(error)
            log.warning(
                "%s; starting all actor ranks again (%d of %d restarts)%s",
                error, self.n_restarts, self._allowed, "" if folder is None else f"; diagnosis: {folder}",
                extra=as_event("actor_restart"),
            )  # fmt: skip
            await kill_workers(self.actors.handles, timeout_s=KILL_TIMEOUT_S)
            ranks = range(len(self.actors))
            for rank in ranks:
                self.actors.replace(rank, self._start(rank))
            try:
                return await set_up_in_new_processes(self.actors, ranks, self._set_up())
            except WorkerDied as death:
                error = death

    async def lost(self, error: GkdError) -> list[str]:
        """Return the labels of the ranks whose process has ended, or else of those whose silence ``error`` reports."""
        late = find_timeout_error(error)
        silent = [] if late is None else [label for label in self._labels() if label in late.silent]
        return [self.actors.label(rank) for rank in await self.actors.dead()] or silent

    async def _check(self, error: GkdError, *, is_counted: bool) -> None:
        """Raise ``error`` unless a rank was lost, and its restart is already counted or another one is left."""
        lost = await self.lost(error)
        if not lost:
            raise error
        if not is_counted and self.n_restarts >= self._allowed:
            if self._allowed:
                log.error("%s was not started again: trainer.max_actor_restarts=%d is used up", lost[0], self._allowed)
            raise error

    def _labels(self) -> list[str]:
        return [self.actors.label(rank) for rank in range(len(self.actors))]
