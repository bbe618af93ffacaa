"""Saves of a run: in the foreground or in the background, with a limited number of failures.

States of a save, and its transitions:

==========  ==========================================================  ==========================================
state       description                                                 next state
==========  ==========================================================  ==========================================
idle        No save is in progress.                                     writing: ``save()``
writing     The folder is made, and the ranks copy their data.          pending: all ranks have copied their data
pending     The ranks write in the background (``is_pending``).         completing: all ranks have written
completing  A thread flushes the files and renames the folder.          idle: the folder has its final name
==========  ==========================================================  ==========================================

A :class:`CheckpointError` of a rank or of the disk in any state removes the folder, counts a failed save and leads to
idle. With ``checkpoint.async_save=false`` all transitions happen within ``save()``. Every wait has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from recipe_gkd.checkpoints.folders import final_folder
from recipe_gkd.checkpoints.save_failures import FailedSave, SaveFailures
from recipe_gkd.checkpoints.save_folders import SaveFolders
from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.checkpoints.store import CheckpointFolderWriter, keep_best
from recipe_gkd.config import Config
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, timeout_of
from recipe_gkd.errors import CheckpointError, GkdError, SavesFailed
from recipe_gkd.runtime.remote_group import R, Ts

log = logging.getLogger(__name__)

# Added to the actors' own deadline, because their error names the cause, and the driver's only a missing reply.
SAVE_DEADLINE_MARGIN_S = 15.0
# Deadline of a background save after a worker has failed.
SAVE_GRACE_PERIOD_S = 1.0
# Deadline of the disk for a save that all ranks have written, after a worker has failed.
COMPLETION_GRACE_PERIOD_S = 30.0


class SavingActor(Protocol):
    """Actor rank that writes its part of a checkpoint; see :class:`recipe_gkd.actor.student_actor.StudentActor`."""

    def save_hf(self, path: str, stop_token_ids: Sequence[int]) -> None:
        """Write a Hugging Face folder that declares these ids."""

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

    async def start(self, folder: Path, stop_token_ids: Sequence[int]) -> None:
        """Write into the checkpoint folder. With ``async_save`` return once every rank has copied its data.

        Args:
            stop_token_ids: Ids that ended responses in training.

        Raises:
            CheckpointError: A rank failed.
        """
        if self._with_hf:  # first, so that a failure leaves no background save behind
            arguments = str(folder / "huggingface"), stop_token_ids
            await self._call_actors(SavingActor.save_hf, *arguments, timeout_s=self._timeout_s)
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


class CheckpointSaver:
    """Saves of one run, at most one at a time.

    Lifecycle::

        saver = CheckpointSaver(config, root, call_actors, best=best)
        await saver.save(progress, best)     # first finishes the previous save
        await saver.finish(wait=False)       # between steps: complete a background save if it is written
        await saver.finish_run(step)         # or, after an error: await saver.give_up(workers_failed=True)

    A :class:`CheckpointError` of an actor or of the disk is a failed save. It is logged as a warning, and raised if
    more than ``trainer.save_failures_allowed`` saves fail. Other errors are raised at once.

    Attributes:
        is_pending: True if the actors are writing a checkpoint that :meth:`finish` completes.
    """

    def __init__(self, config: Config, root: Path, call_actors: CallActors, *, best: Best | None) -> None:
        """Create a saver without a save in progress.

        Args:
            root: Run folder.
            call_actors: Function that calls a method on every actor rank.
            best: Best record on disk when the run starts.
        """
        actor = config.actor_rollout_ref.actor
        self._root = root
        self._background = actor.checkpoint.async_save
        timeout_s = timeout_of(config, ACTOR_TIMEOUT, SAVE_DEADLINE_MARGIN_S)
        with_hf = "hf_model" in actor.checkpoint.save_contents
        self._shards = ShardWriters(call_actors, with_hf=with_hf, timeout_s=timeout_s)
        self._folders = SaveFolders(root, keep=config.trainer.max_actor_ckpt_to_keep, timeout_s=timeout_s)
        self._failures = SaveFailures(config.trainer.save_failures_allowed)
        self._best_on_disk = best
        self._writer: CheckpointFolderWriter | None = None
        self.is_pending = False

    @property
    def failed_saves(self) -> int:
        """Number of failed saves since the run started."""
        return self._failures.count

    @property
    def failed_step(self) -> int | None:
        """Step of the most recent save if it failed, else None."""
        return None if self._failures.last is None else self._failures.last.progress.step

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint that is complete. None before the first one."""
        return self._failures.latest_checkpoint

    async def save(self, progress: Progress, best: Best | None) -> None:
        """Save a checkpoint.

        Args:
            best: Best record of the run, if this checkpoint is the best one, else None.

        Raises:
            CheckpointError: Too many saves failed.
        """
        await self.finish()
        self._failures.last = None
        try:
            self._writer = await self._folders.make(progress, best)
            await self._shards.start(self._writer.folder, progress.stop_token_ids)
        except CheckpointError as error:
            await self._fail(error, FailedSave(progress, best))
            return
        self.is_pending = True
        if not self._background:
            await self.finish()

    async def finish(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """Complete the pending save, if there is one.

        Args:
            wait: Wait until the save is complete. Otherwise complete it only if all ranks have written.
            timeout_s: Deadline of the wait. None: the usual one.

        Raises:
            CheckpointError: Too many saves failed.
        """
        if not self.is_pending:
            return
        assert self._writer is not None
        writer = self._writer
        try:
            written = self._folders.is_completing or await self._shards.finish(wait=wait, timeout_s=timeout_s)
            if not written or not await self._folders.complete(writer, wait=wait, timeout_s=timeout_s):
                return
        except CheckpointError as error:
            await self._fail(error, FailedSave(writer.progress, writer.best))
            return
        self._writer, self.is_pending = None, False
        self._failures.latest_checkpoint = final_folder(self._root, writer.progress.step)
        if writer.best is not None:
            self._best_on_disk = writer.best
        log.info("checkpoint of step %d: %s", writer.progress.step, self._failures.latest_checkpoint)

    async def finish_run(self, step: int) -> None:
        """Complete the pending save. If the save of ``step``, the last one of the run, failed, repeat it once.

        Raises:
            CheckpointError: The save of ``step`` failed twice.
        """
        await self.finish()
        failed = self._failures.last
        if failed is None or failed.progress.step != step:
            return
        log.warning("trying once more to save the checkpoint of step %d, the last one", step)
        await self.save(failed.progress, failed.best)
        await self.finish()
        if self._failures.last is not None:
            raise SavesFailed(
                f"the run ends at step {step}, but the checkpoint of that step could not be saved in two attempts; "
                f"{self._failures.describe_latest()}",
                remedy="make room on the disk and run the command again",
                path=final_folder(self._root, step),
                count=self._failures.count,
                newest=self._failures.latest_checkpoint,
            )

    async def give_up(self, *, workers_failed: bool) -> None:
        """Complete the pending save if it is written, else remove it. Call it if the run ends with an error.

        Args:
            workers_failed: Wait only :data:`SAVE_GRACE_PERIOD_S` for the actors.
        """
        try:
            with suppress(GkdError):
                await self.finish(wait=not workers_failed, timeout_s=SAVE_GRACE_PERIOD_S if workers_failed else None)
                if self._folders.is_completing:  # only the disk is needed; the checkpoint may replace the older ones
                    await self.finish(timeout_s=COMPLETION_GRACE_PERIOD_S)
        finally:
            await self._discard()

    def keep_best(self, best: Best) -> None:
        """Record the weights that the run starts from as the best ones. They need no save."""
        keep_best(self._root, best)
        self._best_on_disk = best

    def best_of(self, best: Best | None) -> Best | None:
        """Return ``best``, or the previous best record if the checkpoint of ``best`` was lost in a failed save."""
        if best is not None and self._writer is not None and self._writer.best == best:
            return best
        return self._best_on_disk

    async def _fail(self, error: CheckpointError, save: FailedSave) -> None:
        await self._discard()
        self._failures.record(error, save)

    async def _discard(self) -> None:
        writer, self._writer = self._writer, None
        self.is_pending = False
        if writer is not None:
            await self._folders.discard(writer)
