"""Checkpoints on disk: all but the content of ``actor/``, which belongs to :mod:`recipe_gkd.actor.checkpoint`.

::

    <default_local_dir>/
        latest_checkpointed_iteration.txt     the number of the last complete one
        global_step_40/
            actor/                            Megatron's distributed checkpoint
            huggingface/                      if checkpoint.save_contents has hf_model
            trainer.json                      step, position in the data, and what they are counted in
        best.json                             by trainer.best_metric, each that was the best so far; the last still is
        best -> global_step_40                that one; it is never removed

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is complete, so a folder with a
final name is complete. ``checkpoint_folders`` has the names and the renames.
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


class CheckpointWriter:
    """A checkpoint that is being written.

    Lifecycle::

        writer = CheckpointWriter(root, progress)   # makes writer.folder, with a temporary name
        ...                                         # the actors write into writer.folder / "actor", perhaps for minutes
        writer.complete()                           # or writer.discard()

    Raises:
        CheckpointError: The disk refuses, or the actors have not completed their part.
    """

    def __init__(self, root: Path, progress: Progress, best: Best | None = None) -> None:
        """Make the folder. ``best``: this checkpoint is the best of the run."""
        self.root, self.progress, self.best = root, progress, best
        self.folder = folders.writing_folder(root, progress.step)
        self.is_written = False
        """All content is on the disk, marked by ``trainer.json``: from then on it is renamed or left, not discarded."""
        folders.remove_folder(self.folder)
        with _writing(self.folder):
            self.folder.mkdir(parents=True)

    def complete(self) -> None:
        """Give the folder its final name, and make it the latest, and perhaps the best. Replaces one of the same step.

        A crash between any two operations leaves the old or the new checkpoint of this step under its final name, or
        under one from which :func:`checkpoint_folders.recover` restores it.
        """
        step, final = self.progress.step, final_folder(self.root, self.progress.step)
        try:
            self._mark_as_written()
        finally:
            if not self.is_written:
                self.discard()
        with _writing(final):
            folders.put_in_place(self.root, step)
        try:
            if self.best is not None:
                keep_best(self.root, self.best)
            with _writing(self.root / folders.LATEST):
                folders.write_latest(self.root, step)
        finally:
            folders.remove_replaced(self.root, step)

    def _mark_as_written(self) -> None:
        metadata = self.folder / ACTOR_METADATA
        with _writing(self.folder):
            if not metadata.is_file() or not metadata.stat().st_size:
                raise CheckpointError(
                    f"the checkpoint of step {self.progress.step} is incomplete: the actors have not written "
                    f"{metadata}, which they do last; their logs say what failed"
                )
            sync_tree(self.folder)
            write_durably(self.folder / TRAINER, json.dumps(asdict(self.progress), indent=2) + "\n")
        self.is_written = True

    def discard(self) -> None:
        """Remove the folder, even while actors write into it. Does nothing to one whose content is complete."""
        if not self.is_written:
            folders.remove_folder(self.folder)


def remove_old(root: Path, *, newest: int, keep: int | None) -> list[int]:
    """Remove complete checkpoints older than the last ``keep`` up to step ``newest``; return their steps.

    The best one stays in addition. Checkpoints of later steps than ``newest``, of a run that was resumed before them,
    stay until this run reaches their steps.
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
    """Record the best so far. ``best.json`` decides; the link, if a crash kept it back, follows later."""
    _write_bests(root, [*(other for other in _read_bests(root) if other.step < best.step), best])


def forget_best(root: Path) -> None:
    """Record that there is no best yet: the run starts afresh in the folder of an earlier one."""
    if _read_bests(root):
        _write_bests(root, [])


def read_best(root: Path, metric: str | None, *, until: int) -> Best | None:
    """Return the best of the run up to step ``until``; with ``metric=None`` by any metric.

    Those of later steps, or by another metric, count no more: a run that starts before them makes these steps anew.
    They stay as checkpoints, but are not called the best.
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


def _read_bests(root: Path) -> list[Best]:
    try:
        return [Best(**best) for best in json.loads((root / BEST).read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{root / BEST} cannot be read: {error}; remove it, and the best checkpoint is sought from here on"
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
def _writing(what: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what} cannot be written: {error}; make sure that {what.parent} can be written to, has space left, and "
            "has nothing else of that name; with trainer.resume_mode=auto the run then goes on from the last checkpoint"
        ) from error
