"""Checkpoints on disk, except the content of ``actor/`` (see :mod:`recipe_gkd.actor.checkpoint.writer`).

::

    <default_local_dir>/
        latest_checkpointed_iteration.txt     step of the last complete checkpoint
        global_step_40/
            actor/                            distributed checkpoint of the backend, Megatron or FSDP
            huggingface/                      if checkpoint.save_contents has hf_model
            trainer.json                      Progress: step, position in the data, properties of the data
        best.json                             list of Best records by trainer.best_metric; the last one is the best
        best -> global_step_40                link to the best checkpoint, which is never removed

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is complete, so a folder with a
final name is complete. :mod:`recipe_gkd.checkpoints.folders` contains the names and the renames.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from recipe_gkd.checkpoints import folders
from recipe_gkd.checkpoints.folders import ACTOR_METADATA, TRAINER, final_folder
from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.durable_files import sync_folder, sync_tree, write_durably

BEST, LINK = "best.json", "best"


class CheckpointFolderWriter:
    """Checkpoint that is being written.

    Lifecycle::

        writer = CheckpointFolderWriter(root, progress)   # makes writer.folder, with a temporary name
        ...                                         # the actors write into writer.folder / "actor"
        writer.complete()                           # or writer.discard()

    Attributes:
        root: Run folder.
        progress: Progress of the run at this checkpoint.
        best: Best record, if this checkpoint is the best one of the run.
        folder: Temporary folder.
        is_written: True if all content is on the disk, marked by ``trainer.json``. From then on the folder is renamed
            or left, but not discarded.

    Raises:
        CheckpointError: The disk failed, or the actors have not completed their part.
    """

    def __init__(self, root: Path, progress: Progress, best: Best | None = None) -> None:
        """Make the folder, and remove an incomplete one of the same step."""
        self.root, self.progress, self.best = root, progress, best
        self.folder = folders.writing_folder(root, progress.step)
        self.is_written = False
        folders.remove_folder(self.folder)
        with _writing(self.folder):
            self.folder.mkdir(parents=True)

    def complete(self) -> None:
        """Record the step as the latest one, rename the folder, and record it as the best one if ``best`` is set.

        It replaces a checkpoint of the same step. After a crash between any two operations, the older or the new
        checkpoint of this step has its final name, or a name from which
        :func:`recipe_gkd.checkpoints.folders.recover` restores it.
        """
        step, final = self.progress.step, final_folder(self.root, self.progress.step)
        try:
            self._mark_as_written()
        finally:
            if not self.is_written:
                self.discard()
        with _writing(self.root / folders.LATEST):  # first, because steps after the latest one are not resumed from
            folders.write_latest(self.root, step)
        with _writing(final):
            folders.put_in_place(self.root, step)
        try:
            if self.best is not None:
                keep_best(self.root, self.best)
        finally:  # a record that cannot be written does not lose the checkpoint
            folders.remove_replaced(self.root, step)

    def _mark_as_written(self) -> None:
        metadata = self.folder / ACTOR_METADATA
        with _writing(self.folder):
            if not metadata.is_file() or not metadata.stat().st_size:
                raise CheckpointError(
                    f"the checkpoint of step {self.progress.step} is incomplete: the actors have not written "
                    f"{metadata}, their last file",
                    remedy="look for an error in their logs",
                    path=metadata,
                )
            sync_tree(self.folder)
            write_durably(self.folder / TRAINER, json.dumps(asdict(self.progress), indent=2) + "\n")
        self.is_written = True

    def discard(self) -> None:
        """Remove the folder, even while actors write into it. A folder with complete content stays."""
        if not self.is_written:
            folders.remove_folder(self.folder)


def remove_old(root: Path, *, newest: int, keep: int | None) -> list[int]:
    """Remove old checkpoints.

    The best checkpoint stays in addition to the last ``keep``. Checkpoints after step ``newest``, which a resumed run
    repeats, stay until the run reaches their steps.

    Args:
        root: Run folder.
        newest: Step of the checkpoint that was just completed.
        keep: Number of complete checkpoints up to ``newest`` to keep. None: all.

    Returns:
        Steps of the removed checkpoints.
    """
    if keep is None:
        return []
    complete = [
        step for step in folders.steps_of(root) if step <= newest and folders.damage(final_folder(root, step)) is None
    ]
    best = {best.step for best in _read_bests(root)[-1:]}
    removed = [step for step in complete[:-keep] if step not in best]
    for step in removed:
        folders.remove_folder(final_folder(root, step))
    return removed


def keep_best(root: Path, best: Best) -> None:
    """Record the best checkpoint so far. ``best.json`` is written before the link, and decides after a crash."""
    _write_bests(root, [*(other for other in _read_bests(root) if other.step < best.step), best])


def forget_best(root: Path) -> None:
    """Remove all best records, because a new run starts in the folder of an earlier one."""
    if _read_bests(root):
        _write_bests(root, [])


def read_best(root: Path, metric: str | None, *, until: int) -> Best | None:
    """Return the best record of the run up to a step, and remove all other records.

    A run that resumes at ``until`` repeats later steps. Their checkpoints stay, but are no longer called the best.

    Args:
        root: Run folder.
        metric: Name of the metric. None: any metric.
        until: Step that the run resumes from.
    """
    bests = _read_bests(root)
    kept = [
        best
        for best in bests
        if best.step <= until
        and metric in (None, best.metric)
        and (not best.has_checkpoint or folders.damage(final_folder(root, best.step)) is None)
    ]
    if bests:
        _write_bests(root, kept)
    return kept[-1] if kept else None


def recorded_best(root: Path) -> Best | None:
    """Return the best record of a run, without a change of its files. None if there is none.

    Raises:
        CheckpointError: ``best.json`` cannot be read.
    """
    return next(reversed(_read_bests(root)), None)


def _read_bests(root: Path) -> list[Best]:
    try:
        return [Best(**best) for best in json.loads((root / BEST).read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{root / BEST} cannot be read: {error}",
            remedy="remove it, and the next validation selects the best checkpoint",
            path=root / BEST,
        ) from error


def _write_bests(root: Path, bests: list[Best]) -> None:
    with _writing(root / LINK):
        write_durably(root / BEST, json.dumps([asdict(best) for best in bests], indent=2) + "\n")
        if not bests or not bests[-1].has_checkpoint:
            (root / LINK).unlink(missing_ok=True)
            return
        draft = root / f".{LINK}.new"
        draft.unlink(missing_ok=True)
        draft.symlink_to(final_folder(root, bests[-1].step).name)
        draft.replace(root / LINK)
        sync_folder(root)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}",
            remedy=f"make sure that {path.parent} is writable, has free space, and has nothing else of that name; with "
            "trainer.resume_mode=auto the next run continues from the last checkpoint",
            path=path,
        ) from error
