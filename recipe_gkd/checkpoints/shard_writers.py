"""Actor ranks as writers of the shards of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from recipe_gkd.runtime.remote_group import R, Ts


class SavingActor(Protocol):
    """Actor rank that writes its part of a checkpoint; see :class:`recipe_gkd.actor.student_actor.StudentActor`."""

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face folder."""

    def save_checkpoint(self, path: str) -> None:
        """Write a checkpoint, in the background if so configured."""

    def finish_saves(self, wait: bool = True) -> bool:
        """Complete the save in the background. Return True if no save is in progress any more."""


class CallActors(Protocol):
    """Function that calls a method on every actor rank and returns the replies."""

    async def __call__(self, method: Callable[[SavingActor, *Ts], R], *args: *Ts, timeout_s: float) -> list[R]:
        """Call the method with ``args``, with a deadline."""


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
            await self._call_actors(SavingActor.save_hf, str(folder / "huggingface"), timeout_s=self._timeout_s)
        await self._call_actors(SavingActor.save_checkpoint, str(folder / "actor"), timeout_s=self._timeout_s)

    async def finish(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Return True if every rank has written its shards.

        Args:
            wait: Wait for the ranks. Otherwise return at once.
            timeout_s: Deadline of the call. None: the usual one.

        Raises:
            CheckpointError: A rank failed. Each failure is reported once.
        """
        written = await self._call_actors(SavingActor.finish_saves, wait, timeout_s=timeout_s or self._timeout_s)
        return all(written)
