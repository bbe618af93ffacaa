"""Validation and loading of a checkpoint of the actor, in the parallel layout that saved it or another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from recipe_gkd.actor.checkpoint.files import (
    BACKEND,
    USE_ANOTHER,
    check_backend,
    check_contents,
    check_file_sizes,
    damage_as_error,
    read_description,
    read_on_all_ranks,
)
from recipe_gkd.actor.megatron.checkpoint_state import (
    load_weights,
    optimizer_kind,
    restore_rng,
    rng_state,
    sharded_state,
)
from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.config.keys import LORA, MEGATRON
from recipe_gkd.errors import CheckpointError, CheckpointMismatch

STRATEGY = "megatron"
# Fields of `ModelDims` that had another name in the checkpoints of earlier versions.
RENAMED_DIMS = {"mixture": "moe"}


def check_checkpoint(path: Path, model: MegatronModel, contents: Sequence[str]) -> dict[str, Any]:
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
    _check_matches(path, common["about"], model, contents)
    return common


def load_checkpoint(path: Path, model: MegatronModel, contents: Sequence[str], common: dict[str, Any]) -> int:
    """Restore a model from a checkpoint of any layout. Collective.

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
    with_rng = "extra" in contents and common["about"]["layout"] == str(model.layout)
    state = sharded_state(model, with_optimizer=with_optimizer, is_loading=True)
    if with_rng:
        state["rng"] = rng_state(model.layout)
    loaded = read_on_all_ranks(path, partial(_read_shards, state), model.device)
    load_weights(model, loaded)
    if with_optimizer:
        model.optimizer.load_state_dict(loaded["optimizer"])
    else:
        model.optimizer.reload_model_params()  # its float32 copies still have the previous weights
    if with_rng:
        restore_rng(loaded["rng"])
    return int(common["step"]) if "extra" in contents else 0


def _read_common(path: Path) -> dict[str, Any]:
    """Read the description of a checkpoint and compare the sizes of its files with it. Not collective.

    Returns:
        Megatron's common state, and the backend that saved the checkpoint. Of another backend only its description.
    """
    description = read_description(path)
    if description[BACKEND] != STRATEGY:
        return description
    with damage_as_error(path):
        common = dist_checkpointing.load_common_state_dict(str(path))
        metadata = FileSystemReader(path).read_metadata()
        if "about" not in common or metadata.storage_data is None:
            raise CheckpointError(f"{path} was not written by recipe_gkd", remedy=USE_ANOTHER, path=path)
        check_file_sizes(path, metadata.storage_data.values())
    return common | {BACKEND: STRATEGY}


def _read_shards(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Read this rank's shards. Collective in Megatron 0.16; in 0.19 a rank does not get the errors of other ranks."""
    try:
        return dist_checkpointing.load(state, str(path), get_default_load_sharded_strategy(str(path)))
    except (CheckpointException, CheckpointingException) as error:
        reasons = [f"{type(e).__name__}: {e}" for e, _ in getattr(error, "failures", {}).values()] or [str(error)]
        raise CheckpointError(
            f"{path} is damaged, or was saved by another version ({'; '.join(sorted(set(reasons)))})",
            remedy=USE_ANOTHER,
            path=path,
        ) from error


def check_same_dims(path: Path, saved: Mapping[str, Any], dims: ModelDims) -> None:
    """Check that a checkpoint is of a model with the same dimensions.

    Args:
        path: Folder of the checkpoint.
        saved: Fields of ``ModelDims`` in the checkpoint, by name.
        dims: Dimensions of the model to load it into.

    Raises:
        CheckpointMismatch: A dimension differs, or the checkpoint has one that this version does not support.
    """
    own = dataclasses.asdict(dims)
    saved = {RENAMED_DIMS.get(name, name): value for name, value in saved.items()}
    if unknown := sorted(saved.keys() - own.keys()):
        raise CheckpointMismatch(
            f"{path} has dimensions of the model that this version of recipe_gkd does not support "
            f"({', '.join(f'{name}: {saved[name]}' for name in unknown)})",
            remedy="use the version that saved it, or another checkpoint",
            path=path,
            differing=tuple(unknown),
        )
    if differing := tuple(name for name, value in saved.items() if own[name] != value):
        values = "; ".join(f"{name}: {saved[name]} there, {own[name]} here" for name in differing)
        raise CheckpointMismatch(f"{path} is a checkpoint of another model ({values})", path=path, differing=differing)


def check_same_adapters(path: Path, saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    """Check that a checkpoint has the same adapters as the model.

    Args:
        path: Folder of the checkpoint.
        saved: Settings of its adapters; None if it has complete weights.
        own: Settings of the adapters of the model to load it into; None if all weights are trained.

    Raises:
        CheckpointMismatch: It has others, or only one of the two has adapters.
    """
    names = sorted({*(saved or {}), *(own or {})})
    if differing := tuple(name for name in names if (saved or {}).get(name) != (own or {}).get(name)):
        values = [f"{name}: {_shown(saved, name)} there, {_shown(own, name)} here" for name in differing]
        raise CheckpointMismatch(
            f"{path} is a checkpoint of other trained weights ({'; '.join(values)})",
            remedy=f"use the same {LORA}.*, or another checkpoint",
            path=path,
            differing=differing,
        )


def _shown(adapters: Mapping[str, Any] | None, name: str) -> str:
    if adapters is None:
        return "no adapters"
    value = adapters.get(name)
    return f"{len(value)} layers" if isinstance(value, list) else str(value)


def _check_matches(path: Path, about: dict[str, Any], model: MegatronModel, contents: Sequence[str]) -> None:
    check_same_dims(path, about["model"], model.dims)
    check_same_adapters(path, about.get("lora"), None if model.lora is None else model.lora.about())
    check_contents(path, about["contents"], contents)
    saved, own = about["optimizer_kind"], optimizer_kind(model)
    differing = [key for key in sorted({*saved, *own}) if saved.get(key) != own.get(key)]
    if "optimizer" in contents and differing:
        values = "; ".join(f"{MEGATRON}.{key}: {saved.get(key)} there, {own.get(key)} here" for key in differing)
        raise CheckpointMismatch(
            f"{path} has the optimizer state of other settings ({values})",
            remedy="use the same settings, or remove optimizer from actor_rollout_ref.actor.checkpoint.load_contents",
            path=path,
            differing=tuple(differing),
        )
