"""Folders of saves on the driver's disk, with a deadline for every operation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.checkpoints.store import CheckpointFolderWriter, remove_old
from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.wait_log import waiting_for

log = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Wait of complete(wait=False) for the flush and the rename, which usually take milliseconds.
COMPLETION_POLL_S = 0.5
# Wait for the removal of a failed save. A removal that takes longer continues in its thread.
DISCARD_TIMEOUT_S = 5.0


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

    def start(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
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


class SaveFolders:
    """Folders that are made, completed or discarded in threads, one operation at a time."""

    def __init__(self, root: Path, *, keep: int | None, timeout_s: float) -> None:
        """Store the settings.

        Args:
            root: Run folder.
            keep: ``trainer.max_actor_ckpt_to_keep``.
            timeout_s: Deadline for making a folder, and for completing one.
        """
        self._root, self._keep, self._timeout_s = root, keep, timeout_s
        self._disk = DiskQueue(root)
        self._completion: asyncio.Future[list[int]] | None = None  # result: steps of the removed checkpoints

    @property
    def is_completing(self) -> bool:
        """True if :meth:`complete` has started to complete a folder that is not complete yet."""
        return self._completion is not None

    async def make(self, progress: Progress, best: Best | None) -> CheckpointFolderWriter:
        """Make the folder of a new checkpoint.

        Raises:
            CheckpointError: The disk failed, or did not answer in time.
        """
        making = self._disk.start(CheckpointFolderWriter, self._root, progress, best)
        with waiting_for(f"checkpoint of step {progress.step}", self._timeout_s, f"the disk of {self._root}"):
            await asyncio.wait([making], timeout=self._timeout_s)
        if not making.done():
            raise CheckpointError(
                f"the disk of {self._root} did not make a folder within {self._timeout_s:g} s",
                remedy="check the disk",
                path=self._root,
            )
        return making.result()

    async def complete(self, writer: CheckpointFolderWriter, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Flush and rename a folder that all ranks have written, and remove old checkpoints.

        If the caller is canceled, the thread continues, and the next call awaits it.

        Args:
            writer: Writer of the folder, the same in all calls until the folder is complete.
            wait: Wait until the folder is complete. Otherwise wait for :data:`COMPLETION_POLL_S` only.
            timeout_s: Deadline of the wait. None: the usual one.

        Returns:
            True if the folder is complete. False only if ``wait`` is false.

        Raises:
            CheckpointError: The disk failed, or did not answer in time.
        """
        if self._completion is None:
            self._completion = self._disk.start(complete_and_clean_up, writer, self._keep)
        wait_s = (timeout_s or self._timeout_s) if wait else COMPLETION_POLL_S
        with waiting_for(f"checkpoint of step {writer.progress.step}", wait_s, f"the disk of {self._root}"):
            await asyncio.wait([self._completion], timeout=wait_s)
        if not self._completion.done():
            if wait:
                raise CheckpointError(
                    f"the checkpoint of step {writer.progress.step} is written, but the disk of {self._root} did not "
                    f"flush and rename it within {wait_s:g} s",
                    remedy="check the disk",
                    path=writer.folder,
                )
            return False
        removed = self._completion.result()
        self._completion = None
        if removed:
            log.info("removed the checkpoints of steps %s (trainer.max_actor_ckpt_to_keep)", removed)
        return True

    async def discard(self, writer: CheckpointFolderWriter) -> None:
        """Remove the folder of a failed save. If that takes long, it continues in its thread."""
        self._completion = None
        removal = self._disk.start(writer.discard)
        await asyncio.wait([removal], timeout=DISCARD_TIMEOUT_S)
        if not removal.done():
            log.warning(
                "%s was not removed within %g s; check the disk. The next run removes it",
                writer.folder,
                DISCARD_TIMEOUT_S,
            )


def complete_and_clean_up(writer: CheckpointFolderWriter, keep: int | None) -> list[int]:
    """Complete a checkpoint and remove old ones. A failed removal is logged as a warning.

    Args:
        writer: Writer of a checkpoint that all ranks have written.
        keep: ``trainer.max_actor_ckpt_to_keep``.

    Returns:
        Steps of the checkpoints that were removed.

    Raises:
        CheckpointError: The checkpoint cannot be completed.
    """
    writer.complete()
    try:
        return remove_old(writer.root, newest=writer.progress.step, keep=keep)
    except (CheckpointError, OSError) as error:
        log.warning("old checkpoints could not be removed (trainer.max_actor_ckpt_to_keep): %s", error)
        return []
