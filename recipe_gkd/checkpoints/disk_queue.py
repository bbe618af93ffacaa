"""Disk operations of the driver, executed in threads and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.threads import in_thread

T = TypeVar("T")


class DiskQueue:
    """Queue of disk operations that run one at a time, each in a thread.

    The event loop serves all stages of a run, so it must not wait for the disk. A caller can stop waiting for an
    operation that hangs. The operation then still precedes all later ones: otherwise it could remove the folder of a
    new save, or make an older checkpoint the latest.
    """

    def __init__(self, root: Path) -> None:
        """Create an empty queue for the run folder ``root``."""
        self._root = root
        self._last: asyncio.Future[Any] | None = None

    def start(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run ``function(*args)`` in a thread after all operations that were started before.

        Returns:
            Future of the result. An OSError of the function becomes a :class:`CheckpointError`.
        """

        async def run_after(previous: asyncio.Future[Any] | None) -> T:
            if previous is not None and not previous.done():
                await asyncio.wait([previous])
            try:
                return await in_thread(function, *args)
            except OSError as error:
                raise CheckpointError(
                    f"the disk of {self._root} failed: {error}", remedy="check the disk", path=self._root
                ) from error

        self._last = operation = asyncio.ensure_future(run_after(self._last))
        return operation
