"""Choice of the checkpoint that a run resumes from: the last one that is complete and fits the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe_gkd.checkpoints.folders import TRAINER, damage, final_folder, steps_of
from recipe_gkd.checkpoints.model_identity import Difference, describe_differences, differences
from recipe_gkd.checkpoints.newest import candidates
from recipe_gkd.checkpoints.run_folder import CONFIG, folder_of
from recipe_gkd.checkpoints.state import Progress
from recipe_gkd.config import Config
from recipe_gkd.data.fingerprints import can_compare
from recipe_gkd.errors import CheckpointError, CheckpointMismatch

log = logging.getLogger(__name__)

START_NEW = "start a new run with trainer.resume_mode=disable"
CHOOSE_ANOTHER = (
    f"choose another with trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N, or {START_NEW}"
)

_FORMER_NAMES = {"answers_fingerprint": "references_fingerprint"}
"""Former names of attributes of :class:`Progress`, in checkpoints of older versions."""

_SELECTION = "the keys that select rows"
_TEACHER_PROMPTS = (
    "the keys of the teachers' prompts (data.teacher_prompt_key; prompt_template of a teacher, and others)"
)
_FINGERPRINTS = (
    ("data_fingerprint", "prompts", _SELECTION),
    ("references_fingerprint", "reference responses", _SELECTION),
    ("teacher_prompts_fingerprint", "prompts of the teachers", _TEACHER_PROMPTS),
)
"""Attribute of :class:`Progress`, the content that it is a hash of, and the settings that determine this content."""


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint whose files exist.

    Attributes:
        folder: Folder of the checkpoint.
        progress: Progress of the run at the checkpoint.
    """

    folder: Path
    progress: Progress


def resume_points(config: Config, expected: Progress) -> list[ResumePoint]:
    """Return the checkpoints that the run can resume from, in order of preference.

    ``trainer.resume_mode`` determines them. With ``auto``, damaged checkpoints are skipped with a warning, and
    ``trainer.resume_from_path`` counts if the run has none. The list has several entries, because only the actors can
    find damaged shards.

    Args:
        expected: Progress of a new run on the same data. A checkpoint must fit its data, and with ``auto`` its model.

    Returns:
        Checkpoints. Empty for a new run.

    Raises:
        CheckpointMismatch: The preferred checkpoint belongs to other data or another model.
        CheckpointError: All checkpoints are damaged, or the one at ``trainer.resume_from_path`` is.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return []
    root = folder_of(trainer)
    if trainer.resume_from_path is not None and (trainer.resume_mode == "resume_path" or not steps_of(root)):
        return [_chosen_point(Path(trainer.resume_from_path), expected)]
    points: list[ResumePoint] = []
    damaged: dict[Path, CheckpointError] = {}
    for folder in _candidates(root):
        try:
            if found := damage(folder):
                raise CheckpointError(f"{folder}: {found.reason}", path=found.path)
            progress = read_progress(folder, expected=expected)
            if changes := _model_changes(progress, expected):
                raise _other_model(folder, changes)
            points.append(ResumePoint(folder, replace(progress, model=expected.model)))
        except CheckpointMismatch:
            if not points:
                raise
            break  # older checkpoints belong to another run
        except CheckpointError as error:
            damaged[folder] = error
            if not points:
                log.warning("skipping a damaged checkpoint and using the previous one: %s", error)
    if damaged and not points:
        raise _all_damaged(f"no checkpoint in {root} can be used", root, damaged)
    return points


def _chosen_point(folder: Path, expected: Progress) -> ResumePoint:
    """Return the checkpoint that the user has chosen. It may have been made from another model."""
    if found := damage(folder):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint ({found.reason})", remedy=CHOOSE_ANOTHER, path=found.path
        )
    progress = read_progress(folder, expected=expected)
    if changes := _model_changes(progress, expected):
        text = describe_differences(changes)
        log.warning("%s was made from another model, and continues with its own weights: %s", folder, text)
    return ResumePoint(folder, replace(progress, model=expected.model))


def _all_damaged(what: str, root: Path, damaged: Mapping[Path, CheckpointError]) -> CheckpointError:
    """Return an error with the reason of each damaged checkpoint, by its folder, as a line of details."""
    return CheckpointError(
        what, remedy=CHOOSE_ANOTHER, details=tuple(map(str, damaged.values())), path=root, tried=tuple(damaged)
    )


def _model_changes(found: Progress, expected: Progress) -> list[Difference]:
    return differences(found.model, expected.model) if found.model and expected.model else []


def _other_model(folder: Path, changes: Sequence[Difference]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{folder} was made from another model than actor_rollout_ref.model.path of this run "
        f"({describe_differences(changes)})",
        remedy=f"the former path is in {folder.parent / CONFIG}. Restore it, or train this model in a new run: set "
        "another trainer.experiment_name, or start over in the same folder with trainer.resume_mode=disable. To "
        "continue from the checkpoint, whose weights are used instead of the model's, set "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}",
        path=folder,
        differing=tuple(change.name for change in changes),
    )


def _candidates(root: Path) -> list[Path]:
    """Return the folders from the latest to the first."""
    steps, problem = candidates(root)
    if problem is not None:
        log.warning("%s: %s; using the newest complete checkpoint", root, problem)
    return [final_folder(root, step) for step in steps]


def read_progress(folder: Path, *, expected: Progress) -> Progress:
    """Return the progress that a checkpoint contains.

    Args:
        folder: Folder of the checkpoint.
        expected: Progress of a new run on the data of this run. If it has a fingerprint of reference responses or of
            teachers' prompts, the result has it too. The result's fingerprint of the prompts can be compared with its.

    Raises:
        CheckpointMismatch: The checkpoint was made with other data or another data order.
        CheckpointError: The file cannot be read.
    """
    try:
        values: dict[str, Any] = dict(json.loads((folder / TRAINER).read_text()))
        found = Progress(**{_FORMER_NAMES.get(name, name): value for name, value in values.items()})
        if wrong := [name for name in ("step", "prompts_trained") if not isinstance(getattr(found, name), int)]:
            raise ValueError(f"{wrong[0]} is not an integer")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / TRAINER} cannot be read: {error}", path=folder / TRAINER) from error
    for name in ("n_prompts", "data_seed", "shuffle"):
        if (saved := getattr(found, name)) != (current := getattr(expected, name)):
            raise CheckpointMismatch(
                f"{folder} was made with {name}={saved}, this run has {name}={current}: its position in the data is "
                "not valid for this run",
                remedy="restore the setting, or use trainer.resume_mode=disable",
                path=folder,
                differing=(name,),
            )
    for name, content, settings in _FINGERPRINTS:
        saved, current = getattr(found, name), getattr(expected, name)
        if saved and current and not can_compare(saved, current):
            log.warning(
                "%s was made by an older version, so its %s cannot be compared with this run's", folder, content
            )
        elif saved and current and saved != current:
            raise CheckpointMismatch(
                f"{folder} was made with other {content}: their number is the same, but their fingerprint is {saved}, "
                f"and this run's is {current}",
                remedy=f"restore data.train_files and {settings}, or train the model in the checkpoint's huggingface "
                "folder on the new data: set actor_rollout_ref.model.path to it, trainer.resume_mode=disable, and "
                "another trainer.default_local_dir",
                path=folder,
                differing=(name,),
            )
    return replace(
        found,
        data_fingerprint=found.data_fingerprint and expected.data_fingerprint,
        references_fingerprint=expected.references_fingerprint or found.references_fingerprint,
        teacher_prompts_fingerprint=expected.teacher_prompts_fingerprint or found.teacher_prompts_fingerprint,
        stop_token_ids=expected.stop_token_ids,
    )


async def load_first_usable(
    points: Sequence[ResumePoint], load: Callable[[str], Awaitable[object]], *, may_skip: bool
) -> ResumePoint:
    """Load the first checkpoint that the actors accept, and return it.

    Args:
        points: At least one checkpoint, in order of preference.
        load: Function that loads an ``actor/`` folder on all actor ranks.
        may_skip: Skip a checkpoint with damaged shards, with a warning.

    Raises:
        CheckpointMismatch: A complete checkpoint does not fit the model or the settings.
        CheckpointError: All checkpoints are damaged.
    """
    damaged: dict[Path, CheckpointError] = {}
    for point in points:
        try:
            await load(str(point.folder.absolute() / "actor"))
        except CheckpointMismatch:
            raise
        except CheckpointError as error:
            if not may_skip:
                raise
            damaged[point.folder] = error
            log.warning("skipping the damaged checkpoint %s and using the previous one: %s", point.folder, error)
        else:
            if not point.progress.data_fingerprint:
                log.warning("%s was made by an older version, so its data cannot be compared", point.folder)
            return point
    raise _all_damaged("no checkpoint could be loaded", points[0].folder.parent, damaged)
