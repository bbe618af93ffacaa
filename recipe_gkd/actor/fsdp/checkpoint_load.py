"""Validation and loading of a checkpoint of the FSDP backend, by any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dist_checkpoint
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recipe_gkd.actor.checkpoint.files import (
    BACKEND,
    DESCRIPTION,
    USE_ANOTHER,
    check_backend,
    check_contents,
    check_file_sizes,
    damage_as_error,
    read_description,
    read_on_all_ranks,
)
from recipe_gkd.actor.fsdp.checkpoint_state import (
    STRATEGY,
    model_dims,
    restore_rng,
    rng_kinds,
    rng_state,
    set_adam_steps,
    sharded_state,
    trained_parameters,
)
from recipe_gkd.actor.fsdp.fsdp_model import FsdpModel
from recipe_gkd.errors import CheckpointError, CheckpointMismatch

FIELDS = {"optimizer": {"adam_steps"}, "extra": {"step", "rng"}}
"""Fields of the description by part of the checkpoint."""
MAX_LISTED_WEIGHTS = 3
"""Number of differing weights that an error message lists."""


def check_checkpoint(path: Path, model: FsdpModel, contents: Sequence[str]) -> dict[str, Any]:
    """Check that a checkpoint can be loaded, without changing the model. Collective.

    Args:
        path: Folder of the checkpoint.
        model: Model to load it into.
        contents: Parts to load: ``model``, ``optimizer``, ``extra``.

    Returns:
        The common part of the checkpoint, for :func:`load_checkpoint`.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or damaged. Raised on all ranks.
        CheckpointMismatch: It is of another model or backend, or lacks one of ``contents``. Raised on all ranks.
    """
    common = read_on_all_ranks(path, _read_common, model.device)
    check_backend(path, common[BACKEND], STRATEGY)  # this and the following have the same result on all ranks
    check_contents(path, common["contents"], contents)
    own = {name: tuple(parameter.shape) for name, parameter in trained_parameters(model).items()}
    check_same_model(path, common, model_dims(model), own)
    return common


def load_checkpoint(path: Path, model: FsdpModel, contents: Sequence[str], common: dict[str, Any]) -> int:
    """Restore a model from a checkpoint of any number of ranks and any ``fsdp_size``. Collective.

    Args:
        path: Folder of the checkpoint.
        model: Model to load it into.
        contents: Parts to load: ``model``, ``optimizer``, ``extra``.
        common: Result of :func:`check_checkpoint`.

    Returns:
        Number of completed updates; 0 if ``contents`` does not include ``extra``.

    Raises:
        CheckpointError: The content is damaged. Raised on all ranks. The model is then partly overwritten.
    """
    with_optimizer = "optimizer" in contents
    state = sharded_state(model, with_optimizer=with_optimizer)
    # The state belongs to a rank, and can only be restored by the same number of ranks on the same kind of device.
    is_same_layout = common["ranks"] == model.layout.world_size and common.get("rng") == rng_kinds(model)
    with_rng = "extra" in contents and is_same_layout
    if with_rng:
        state |= rng_state(model)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dist_checkpoint.load(state, storage_reader=FileSystemReader(path), planner=planner)
    except CheckpointException as error:  # torch raises it on all ranks; it is a BaseException
        reasons = sorted({f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values()})
        raise CheckpointError(
            f"{path} is damaged, or was saved by another version ({'; '.join(reasons)})",
            remedy=USE_ANOTHER,
            path=path,
        ) from error
    if with_optimizer:
        set_adam_steps(model, common["adam_steps"])
    if with_rng:
        restore_rng(model, state)
    return int(common["step"]) if "extra" in contents else 0


def _read_common(path: Path) -> dict[str, Any]:
    """Read the description of a checkpoint and compare the sizes of its files with it. Not collective.

    Returns:
        The description, with the complete shapes of the model's ``weights`` by name. Of a checkpoint of another backend
        only the description.
    """
    common = read_description(path)
    if common[BACKEND] != STRATEGY:
        return common
    with damage_as_error(path):
        required = {"contents", "model", "ranks"}.union(*(FIELDS.get(part, ()) for part in common["contents"]))
        if missing := sorted(required - common.keys()):
            raise CheckpointError(
                f"{path} is damaged: its {DESCRIPTION} has no {', '.join(missing)}",
                remedy=USE_ANOTHER,
                path=path / DESCRIPTION,
            )
        metadata = FileSystemReader(path).read_metadata()
        check_file_sizes(path, metadata.storage_data.values())
        common["weights"] = {
            name.removeprefix("model."): tuple(entry.size)
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
    return common


def check_same_model(
    path: Path, saved: Mapping[str, Any], dims: Mapping[str, Any], weights: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a checkpoint is of a model with the same dimensions and trained weights.

    Args:
        path: Folder of the checkpoint.
        saved: Common part of the checkpoint, with its dimensions (``model``) and shapes of ``weights``.
        dims: Dimensions of the model to load it into.
        weights: Complete shapes of its trained weights, by name.

    Raises:
        CheckpointMismatch: A dimension, or the name or shape of a weight differs.
    """
    names = [name for name, value in saved["model"].items() if dims.get(name) != value]
    shown = [f"{name}: {saved['model'][name]} there, {dims.get(name)} here" for name in names]
    if not names:
        names = sorted(
            name for name in saved["weights"].keys() | weights if saved["weights"].get(name) != weights.get(name)
        )
        shown = [
            f"weight {name}: {_shape(saved['weights'].get(name))} there, {_shape(weights.get(name))} here"
            for name in islice(names, MAX_LISTED_WEIGHTS)
        ]
        if len(names) > MAX_LISTED_WEIGHTS:
            shown.append(f"{len(names) - MAX_LISTED_WEIGHTS} more weights differ")
    if names:
        raise CheckpointMismatch(
            f"{path} is a checkpoint of another model, or of other trained weights ({'; '.join(shown)})",
            remedy="use the same actor_rollout_ref.model.path and settings of the actor, or another checkpoint",
            path=path,
            differing=tuple(names),
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not trained" if shape is None else str(list(shape))
