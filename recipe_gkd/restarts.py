"""Rollout workers that die are replaced, a number of times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from recipe_gkd.errors import WorkerDied
from recipe_gkd.groups import WorkerGroup

log = logging.getLogger(__name__)


class RolloutRestarts:
    """Starts rollout workers anew when they die, ``trainer.max_worker_restarts`` times in a run."""

    def __init__(self, rollouts: WorkerGroup, start: Callable[[int], Any], *, allowed: int, timeout_s: float) -> None:
        """``start``: rank -> handle of a new worker in that rank's place."""
        self._rollouts, self._start, self._allowed, self._timeout_s = rollouts, start, allowed, timeout_s
        self._used = 0
        self._one_at_a_time = asyncio.Lock()

    async def replace_dead(self, death: WorkerDied | None = None) -> None:
        """Returns when every rank has a living worker that is set up. Raises ``death`` if no more may be replaced."""
        async with self._one_at_a_time:
            await self._replace_dead(death)

    async def _replace_dead(self, death: WorkerDied | None) -> None:
        dead = await self._rollouts.dead()
        for rank in dead:
            label = self._rollouts.label(rank)
            if self._used == self._allowed:
                raise WorkerDied(
                    f"{death or f'{label} died'}; it was not replaced: trainer.max_worker_restarts={self._allowed} "
                    f"{'are used up' if self._allowed else 'allows none'}"
                ) from death
            self._used += 1
            log.warning("%s died; starting another (%d of %d restarts)", label, self._used, self._allowed)
            self._rollouts.replace(rank, self._start(rank))
        await asyncio.gather(
            *(self._rollouts.call_one(rank, "setup", timeout_s=self._timeout_s, phase="start again") for rank in dead)
        )
