"""Choose the checkpoint that a run resumes from: the last one that is complete and fits the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipe_gkd.checkpoints.folders import LATEST, TRAINER, damage, final_folder, read_latest, steps_of
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.checkpoints.state import Progress
from recipe_gkd.config import Config
from recipe_gkd.errors import CheckpointError, CheckpointMismatch

log = logging.getLogger(__name__)

FRESH = "start afresh with trainer.resume_mode=disable"
ANOTHER = f"choose another with trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N, or {FRESH}"


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that looks complete, and the progress of its run."""

    folder: Path
    progress: Progress


def resume_points(config: Config, expected: Progress) -> list[ResumePoint]:
    """Return the checkpoints to resume from by ``trainer.resume_mode``, in order of preference; none: start afresh.

    With ``auto``, damaged ones are skipped with a warning, so an actor that finds the shards of the first one damaged
    can take the next.

    Args:
        config: Configuration of this run.
        expected: Progress of this run before its first step, whose data a checkpoint must fit.

    Raises:
        CheckpointMismatch: A checkpoint belongs to other data.
        CheckpointError: There are checkpoints, but all are damaged, or the one that was asked for is.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return []
    if trainer.resume_mode == "resume_path":
        folder = Path(trainer.resume_from_path or "").expanduser()
        if reason := damage(folder):
            raise CheckpointError(f"{folder} is no complete checkpoint ({reason}); {ANOTHER}")
        return [ResumePoint(folder, read_progress(folder, expected=expected))]
    root = folder_of(trainer)
    points, damaged = [], []
    for folder in _candidates(root):
        try:
            if reason := damage(folder):
                raise CheckpointError(f"{folder}: {reason}")
            points.append(ResumePoint(folder, read_progress(folder, expected=expected)))
        except CheckpointMismatch:
            if not points:
                raise
            break  # older ones belong to another run; the newest decides
        except CheckpointError as error:
            damaged.append(str(error))
            if not points:
                log.warning("damaged checkpoint skipped, the one before is used: %s", error)
    if damaged and not points:
        raise CheckpointError(f"no checkpoint in {root} can be used ({'; '.join(damaged)}); {ANOTHER}")
    return points


def _candidates(root: Path) -> list[Path]:
    """Return the folders from the latest to the first. Steps after the latest belong to a run that was abandoned."""
    steps, latest = steps_of(root), read_latest(root)
    if latest is None:
        if (root / LATEST).exists():
            log.warning("%s is damaged: taking the checkpoint of the highest step", root / LATEST)
    else:
        steps = sorted({*(step for step in steps if step < latest), latest})
    return [final_folder(root, step) for step in reversed(steps)]


def read_progress(folder: Path, *, expected: Progress) -> Progress:
    """Return the progress of the checkpoint's run, with the reference responses of this run if it trains on them.

    Raises:
        CheckpointMismatch: Its position would mean another place in this run's data.
        CheckpointError: Its file cannot be read.
    """
    try:
        found = Progress(**json.loads((folder / TRAINER).read_text()))
        if wrong := [name for name in ("step", "prompts_trained") if not isinstance(getattr(found, name), int)]:
            raise ValueError(f"{wrong[0]} is no integer")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / TRAINER} cannot be read: {error}") from error
    for name in ("n_prompts", "data_seed", "shuffle"):
        if (was := getattr(found, name)) != (now := getattr(expected, name)):
            raise CheckpointMismatch(
                f"{folder} was made with {name}={was}, this run has {name}={now}: its position in the "
                "data would be another one. Restore the setting, or use trainer.resume_mode=disable"
            )
    for name, what in (("data_fingerprint", "prompts"), ("answers_fingerprint", "reference responses")):
        was, now = getattr(found, name), getattr(expected, name)
        if was and now and was != now:
            raise CheckpointMismatch(
                f"{folder} was made with other {what}: as many as this run has, but they have the fingerprint {was}, "
                f"and this run's {now}. Restore data.train_files (and what selects from them), or train the model in "
                "its huggingface folder on the new data: actor_rollout_ref.model.path with "
                "trainer.resume_mode=disable and another trainer.default_local_dir"
            )
    return replace(found, answers_fingerprint=expected.answers_fingerprint or found.answers_fingerprint)


async def load_first_usable(
    points: Sequence[ResumePoint], load: Callable[[str], Awaitable[object]], *, may_skip: bool
) -> ResumePoint:
    """Load the first checkpoint that the actors accept, and return it.

    Args:
        points: In order of preference, at least one.
        load: Loads an ``actor/`` folder on all actor ranks.
        may_skip: Take the next one, with a warning, if the actors find one damaged.

    Raises:
        CheckpointMismatch: A checkpoint is complete, but does not fit the model or the settings.
        CheckpointError: All are damaged.
    """
    damaged = []
    for point in points:
        try:
            await load(str(point.folder.absolute() / "actor"))
        except CheckpointMismatch:
            raise
        except CheckpointError as error:
            if not may_skip:
                raise
            damaged.append(str(error))
            log.warning("damaged checkpoint %s skipped, the one before is used: %s", point.folder, error)
        else:
            if not point.progress.data_fingerprint:
                log.warning("%s is of an older version: it cannot be checked that its data are the same", point.folder)
            return point
    raise CheckpointError(f"no checkpoint could be loaded ({'; '.join(damaged)}); {ANOTHER}")
