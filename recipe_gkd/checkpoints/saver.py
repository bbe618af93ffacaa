"""Save checkpoints through the actors, at once or in the background, and survive a limited number of failed saves.

::

    idle --save()--> writing --all ranks have their data on the way--> pending --all have written--> completing --> idle
                        |                                                 |                              |
                        +------------------ CheckpointError of a rank or of the disk --------------------+
                                                          |
                                                          +--> folder removed, counted, idle

``checkpoint.async_save=false`` passes through the same states within ``save()``. The driver's own work on the disk
(making folders, flushing, renaming, removing) is done in threads, because the event loop serves all stages of the run.
Each wait for it has a deadline. Work that hangs is left behind, and what comes after it waits for its turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from recipe_gkd.checkpoints.folders import final_folder
from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.checkpoints.store import CheckpointWriter, keep_best, remove_old
from recipe_gkd.config import Config
from recipe_gkd.errors import CheckpointError, GkdError
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_DEADLINE_MARGIN_S = 15.0
"""Added to the actors' own deadline, because their error names the cause and the driver's only a missing reply."""
SAVE_GRACE_PERIOD_S = 1.0
"""Deadline for a background save to be complete once a worker has failed."""
SHORT_WAIT_S = 0.5
"""Time that ``finish(wait=False)`` gives the driver's own work on the disk, which usually takes milliseconds."""
DISCARD_S = 5.0
"""Time that the removal of a failed save may take before the run goes on without waiting for it."""

CallActors = Callable[..., Awaitable[list[Any]]]
"""``call(method, *args, timeout_s=...)`` on every actor rank."""


class CheckpointSaver:
    """Saves of one run, at most one at a time.

    Lifecycle::

        saver = CheckpointSaver(config, root, call_actors, best=best)
        await saver.save(progress, best)     # finishes the one before first
        await saver.finish(wait=False)       # between steps: complete a background save if it is written
        await saver.finish_run(step)         # or, after an error: await saver.give_up(workers_failed=True)

    A :class:`CheckpointError` of an actor or of the disk is a failed save: a warning in the log, and nothing remains of
    the save. Above ``trainer.save_failures_allowed`` failures it is raised. Other errors are raised at once.

    Attributes:
        failed_saves: Failed saves of this run.
    """

    def __init__(self, config: Config, root: Path, call_actors: CallActors, *, best: Best | None) -> None:
        """Create a saver without a pending save. ``best`` is recorded on disk when the run starts."""
        actor = config.actor_rollout_ref.actor
        self._root, self._call_actors = root, call_actors
        self._with_hf = "hf_model" in actor.checkpoint.save_contents
        self._background = actor.checkpoint.async_save
        self._timeout_s = actor.timeout_s + SAVE_DEADLINE_MARGIN_S
        self._keep = config.trainer.max_actor_ckpt_to_keep
        self._allowed = config.trainer.save_failures_allowed
        self._writer: CheckpointWriter | None = None
        self._completion: asyncio.Future[list[int]] | None = None  # -> steps whose checkpoints were removed
        self._disk_work: asyncio.Future[Any] | None = None  # the last that was started
        self._best_on_disk = best
        self._failed: tuple[Progress, Best | None] | None = None  # of the last save, if it failed
        self._latest: Path | None = None
        self.is_pending = False
        """The actors are writing a checkpoint that only :meth:`finish` completes."""
        self.failed_saves = 0

    async def save(self, progress: Progress, best: Best | None) -> None:
        """Save a checkpoint. ``best``: its value, if it is the best of the run, else None."""
        await self.finish()
        try:
            self._failed = None
            making = self._start_on_disk(CheckpointWriter, self._root, progress, best)
            await asyncio.wait([making], timeout=self._timeout_s)
            if not making.done():
                raise CheckpointError(
                    f"the disk of {self._root} did not make a folder within {self._timeout_s:g} s; look at the disk"
                )
            self._writer = writer = making.result()
            if self._with_hf:  # first: if it fails, no background save has begun
                await self._call("save_hf", str(writer.folder / "huggingface"))
            await self._call("save_checkpoint", str(writer.folder / "actor"))
        except CheckpointError as error:
            await self._count_failure(error, progress, best)
            return
        self.is_pending = True
        if not self._background:
            await self.finish()

    async def finish(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """Complete the pending save, if there is one; with ``wait=False`` only if it is written."""
        if not self.is_pending:
            return
        assert self._writer is not None
        writer = self._writer
        try:
            if self._completion is None and all(await self._call("finish_saves", wait, timeout_s=timeout_s)):
                self._completion = self._start_on_disk(self._complete_on_disk, writer)
            if self._completion is not None:
                patience_s = (timeout_s or self._timeout_s) if wait else SHORT_WAIT_S
                await self._await_completion(writer, self._completion, patience_s, must_end=wait)
        except CheckpointError as error:
            await self._count_failure(error, writer.progress, writer.best)

    async def finish_run(self, step: int) -> None:
        """Complete the pending save. If the save of ``step``, the last one of the run, failed, try once more.

        Raises:
            CheckpointError: There is no checkpoint of ``step`` although one was due.
        """
        await self.finish()
        if self._failed is None or self._failed[0].step != step:
            return
        log.warning("trying once more to save the checkpoint of step %d, the last one", step)
        await self.save(*self._failed)
        await self.finish()
        if self._failed is not None:
            raise CheckpointError(
                f"the run was trained to its last step, {step}, but the checkpoint of that step could not be saved, "
                f"although tried twice; {self._where()}. Make room on the disk and run the command again"
            )

    async def give_up(self, *, workers_failed: bool) -> None:
        """Complete the pending save if it is written, else remove it; to be called when the run ends with an error.

        ``workers_failed``: give the actors 1 s only. Otherwise wait for them, up to their deadline.
        """
        try:
            with suppress(GkdError):
                await self.finish(wait=not workers_failed, timeout_s=SAVE_GRACE_PERIOD_S if workers_failed else None)
        finally:
            await self._discard()

    def keep_best(self, best: Best) -> None:
        """Record weights as the best that need no save: those that the run starts from."""
        keep_best(self._root, best)
        self._best_on_disk = best

    def best_of(self, best: Best | None) -> Best | None:
        """Return ``best``, or the best before if the checkpoint of ``best`` was lost in a failed save."""
        if best is not None and self._writer is not None and self._writer.best == best:
            return best
        return self._best_on_disk

    # ---- work on the disk

    def _start_on_disk(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run ``function(*args)`` in a thread, once all work on the disk that was started before has ended.

        Work that nobody waits for any more may still go on. If later work overtook it, it could remove the folder of a
        new save, or make an older checkpoint the latest.

        Returns:
            Future of the result. It raises :class:`CheckpointError` for an error of the disk.
        """

        async def in_turn(before: asyncio.Future[Any] | None) -> T:
            if before is not None and not before.done():
                await asyncio.wait([before])
            try:
                return await in_thread(function, *args)
            except OSError as error:
                raise CheckpointError(f"the disk of {self._root} failed: {error}; look at the disk") from error

        self._disk_work = work = asyncio.ensure_future(in_turn(self._disk_work))
        return work

    def _complete_on_disk(self, writer: CheckpointWriter) -> list[int]:
        """Give the checkpoint its name, and return the steps whose checkpoints were removed for it. In a thread."""
        writer.complete()
        try:
            return remove_old(self._root, newest=writer.progress.step, keep=self._keep)
        except (CheckpointError, OSError) as error:  # the checkpoint is complete nevertheless
            log.warning("old checkpoints could not be removed (trainer.max_actor_ckpt_to_keep): %s", error)
            return []

    # ---- the end of a save

    async def _await_completion(
        self, writer: CheckpointWriter, completion: asyncio.Future[list[int]], patience_s: float, *, must_end: bool
    ) -> None:
        """Wait for the thread. A caller that is canceled leaves it to the next call of :meth:`finish`."""
        await asyncio.wait([completion], timeout=patience_s)
        if not completion.done():
            if must_end:
                raise CheckpointError(
                    f"the checkpoint of step {writer.progress.step} is written, but the disk of {self._root} did not "
                    f"flush and rename it within {patience_s:g} s; look at the disk"
                )
            return
        step = writer.progress.step
        removed = completion.result()
        self._writer = self._completion = None
        self.is_pending, self._latest = False, final_folder(self._root, step)
        if writer.best is not None:
            self._best_on_disk = writer.best
        log.info("checkpoint of step %d: %s", step, self._latest)
        if removed:
            log.info("removed the checkpoints of steps %s (trainer.max_actor_ckpt_to_keep)", removed)

    async def _count_failure(self, error: CheckpointError, progress: Progress, best: Best | None) -> None:
        await self._discard()
        self.failed_saves += 1
        self._failed = (progress, best)
        summary = f"{self.failed_saves} failed so far, trainer.save_failures_allowed={self._allowed}; {self._where()}"
        if self.failed_saves > self._allowed:
            raise CheckpointError(f"{error}\nthe run ends, as too many saves failed: {summary}") from error
        log.warning("the checkpoint of step %d could not be saved: %s\n%s", progress.step, error, summary)

    async def _discard(self) -> None:
        writer, self._writer, self._completion = self._writer, None, None
        self.is_pending = False
        if writer is None:
            return
        removal = self._start_on_disk(writer.discard)
        await asyncio.wait([removal], timeout=DISCARD_S)
        if not removal.done():
            log.warning("%s not removed within %g s; look at the disk. The next run does", writer.folder, DISCARD_S)

    def _where(self) -> str:
        return f"the last complete checkpoint is {self._latest}" if self._latest else "this run has saved none so far"

    async def _call(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        return await self._call_actors(method, *args, timeout_s=timeout_s or self._timeout_s)
