"""Choice of the newest complete checkpoint of a run. A resumed run and all commands use this one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from recipe_gkd.checkpoints.folders import LATEST, damage, final_folder, read_latest, steps_of
from recipe_gkd.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Newest:
    """Newest complete checkpoint of a run.

    Attributes:
        step: Its step. None if the run has no complete checkpoint.
        folder: Its folder, likewise.
        reasons: Reasons why a newer folder, or the step in the file of the latest one, was not chosen.
        incomplete: The newer folders that were not chosen, newest first.
    """

    step: int | None
    folder: Path | None
    reasons: tuple[str, ...]
    incomplete: tuple[Path, ...] = ()


def newest_complete(root: Path) -> Newest:
    """Return the newest complete checkpoint of the run folder ``root``. The shards are not read."""
    steps, problem = candidates(root)
    reasons = [] if problem is None else [problem]
    incomplete: list[Path] = []
    for step in steps:
        folder = final_folder(root, step)
        if (found := damage(folder)) is None:
            return Newest(step, folder, tuple(reasons), tuple(incomplete))
        reasons.append(f"{folder.name} is not complete: {found.reason}")
        incomplete.append(folder)
    return Newest(None, None, tuple(reasons), tuple(incomplete))


def candidates(root: Path) -> tuple[list[int], str | None]:
    """Return the steps from the latest to the first, complete or damaged, and the problem of :data:`LATEST` if any.

    Steps after the latest belong to an abandoned run. Without a readable file of the latest one, all are returned.
    """
    steps, latest = steps_of(root), read_latest(root)
    if latest is not None:
        steps = sorted({*(step for step in steps if step < latest), latest})
    problem = None
    if latest is None and steps:
        problem = f"{LATEST} is {'damaged' if (root / LATEST).exists() else 'missing'}"
    return steps[::-1], problem


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint folder, the newest complete one if ``folder`` belongs to a run.

    A line of the log gives the reason if it is not the newest folder, or the file of the latest one cannot be read.

    Raises:
        CheckpointError: There is none, or it is incomplete.
    """
    if not is_run(folder):
        if problem := damage(folder):
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: {problem.reason}",
                remedy="use another checkpoint of the run",
                path=problem.path,
            )
        return folder
    if not steps_of(folder):
        raise CheckpointError(
            f"{folder} is neither a checkpoint nor a run with checkpoints",
            remedy="expected a folder global_step_N, or a folder that contains one",
            path=folder,
        )
    newest = newest_complete(folder)
    if newest.folder is None:
        raise CheckpointError(
            f"{folder} has no complete checkpoint ({'; '.join(newest.reasons)})",
            remedy="give the folder of a complete checkpoint global_step_N",
            path=folder,
            tried=newest.incomplete,
        )
    if newest.reasons:
        log.warning("using %s, the newest complete checkpoint: %s", newest.folder, "; ".join(newest.reasons))
    return newest.folder


def is_run(folder: Path) -> bool:
    """Return True if an existing folder is not a checkpoint."""
    return folder.is_dir() and not (folder / "trainer.json").exists() and not (folder / "actor").exists()
