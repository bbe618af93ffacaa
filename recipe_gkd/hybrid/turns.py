"""Mutual exclusion of phases. A phase may have several users at a time, such as one stream per rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

from recipe_gkd.runtime.tasks import run_to_end

DevicePhase = Literal["generate", "score", "update", "sync"]
Switch = Callable[[DevicePhase | None, DevicePhase], Coroutine[Any, Any, None]]


class Turns:
    """Phases of which only one can be in use.

    Args:
        switch: ``switch(before, after)`` prepares the devices for the phase ``after``. ``before`` is the last phase, or
            None at the start and after a failed switch.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._phase: DevicePhase | None = None
        self._n_users = 0
        self._is_switching = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, phase: DevicePhase) -> AsyncIterator[None]:
        """Use a phase during the body. Waits until all users of another phase have ended.

        A user must not wait for another phase, because that phase waits for it.

        Args:
            phase: DevicePhase to use.

        Raises:
            Exception: The devices could not be prepared. The next turn tries again.
        """
        while self._is_switching or self._phase != phase:
            if self._is_switching or self._n_users:
                await self._changed.wait()
            else:
                await self._switch_to(phase)
        self._n_users += 1
        try:
            yield
        finally:
            self._n_users -= 1
            self._notify()

    async def _switch_to(self, phase: DevicePhase) -> None:
        before, self._phase = self._phase, None
        self._is_switching = True
        try:
            # To the end, because the state of the devices would be unknown if a stop canceled it halfway.
            await run_to_end(self._switch(before, phase))
            self._phase = phase
        finally:
            self._is_switching = False
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
