"""Gate between generation and weight updates of one worker.

======= =========================== =================================================================================
State   Entered by                  Generation
======= =========================== =================================================================================
open    construction, ``end``       runs
closing ``begin`` without inflight  new calls wait; running calls finish
paused  ``begin`` with inflight     new calls wait; the engine stops stepping, and running requests stay as they are
======= =========================== =================================================================================

``end`` stays paused in one case: the update that has just failed made the engine invalid, so that the next update may
repair it. If that fails too, the paused requests end with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.weight_updates import WeightUpdates


class UpdateGate:
    """Gate between generation and weight updates of one worker.

    Args:
        updates: State of the engine's weights.
    """

    def __init__(self, engine: RolloutEngine, updates: WeightUpdates) -> None:
        self._engine, self._updates = engine, updates
        self._n_generating = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._paused = False
        self._was_invalid = False

    @property
    def n_generating(self) -> int:
        """Number of calls that generate."""
        return self._n_generating

    async def wait_until_open(self) -> None:
        """Wait for the end of the current update."""
        await self._open.wait()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Mark one call as generating."""
        self._n_generating += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_generating -= 1
            if not self._n_generating:
                self._idle.set()

    def begin(self, *, inflight: bool) -> Awaitable[Any]:
        """Close the gate.

        Args:
            inflight: If True, pause running requests; if False, let them finish.

        Returns:
            Awaitable that ends when the engine does not generate.
        """
        self._open.clear()
        self._paused, self._was_invalid = inflight or self._paused, self._updates.invalidity is not None
        return asyncio.wrap_future(self._engine.pause()) if self._paused else self._idle.wait()

    def end(self) -> None:
        """Open the gate. Paused requests continue, or end with an error if the engine is invalid."""
        invalidity = self._updates.invalidity
        if self._paused and invalidity and not self._was_invalid:
            return  # the next sync may repair it
        effect = "the responses in flight were discarded"
        self._engine.resume(invalidity.error(self._updates.name, effect) if invalidity else None)
        self._paused = False
        self._open.set()
