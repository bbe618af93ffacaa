"""Actor ranks as writers of the shards of a checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# call(method, *args, timeout_s=...) calls a method on every actor rank and returns the replies.
CallActors = Callable[..., Awaitable[list[Any]]]


class ShardWriters:
    """Writers of the actor's part of a checkpoint, one per rank."""

    def __init__(self, call_actors: CallActors, *, with_hf: bool, timeout_s: float) -> None:
        """Store the settings.

        Args:
            call_actors: Function that calls a method on every actor rank.
            with_hf: Write a Hugging Face folder too.
            timeout_s: Deadline of each call.
        """
        self._call_actors = call_actors
        self._with_hf = with_hf
        self._timeout_s = timeout_s

    async def start(self, folder: Path) -> None:
        """Write into the checkpoint folder. With ``async_save`` return once every rank has copied its data.

        Raises:
            CheckpointError: A rank failed.
        """
        if self._with_hf:  # first, so that a failure leaves no background save behind
            await self._call_actors("save_hf", str(folder / "huggingface"), timeout_s=self._timeout_s)
        await self._call_actors("save_checkpoint", str(folder / "actor"), timeout_s=self._timeout_s)

    async def finish(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Return True if every rank has written its shards.

        Args:
            wait: Wait for the ranks. Otherwise return at once.
            timeout_s: Deadline of the call. None: the usual one.

        Raises:
            CheckpointError: A rank failed. Each failure is reported once.
        """
        return all(await self._call_actors("finish_saves", wait, timeout_s=timeout_s or self._timeout_s))
