"""Checkpoint and settings that an export reads. Imports no Megatron and no torch model."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe_gkd.checkpoints.folders import ACTOR_METADATA, TRAINER
from recipe_gkd.checkpoints.newest import find_checkpoint
from recipe_gkd.checkpoints.run_folder import CONFIG
from recipe_gkd.config import Config
from recipe_gkd.config.compose import compose_config, fill_missing_keys
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.config.keys import FSDP, LORA, MEGATRON, MODEL, MODEL_PATH, STRATEGY
from recipe_gkd.config.load import to_config
from recipe_gkd.errors import CheckpointError, ConfigError, ModelError

COPIED = (f"{MODEL}.trust_remote_code", LORA, f"{MEGATRON}.dtype", f"{FSDP}.dtype")
"""Keys of the run that determine names, shapes and types of its weights. The number of ranks does not."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Checkpoint to export.

    Attributes:
        checkpoint: Folder ``global_step_N``.
        config: Configuration of one rank that can load it.
        model: Model folder that the run started from.
        stop_token_ids: Ids at which responses ended in training. Empty in checkpoints of older versions.
    """

    checkpoint: Path
    config: Config
    model: Path
    stop_token_ids: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """Data type that the run exports."""
        actor = self.config.actor_rollout_ref.actor
        return str(actor.fsdp_config.dtype if actor.strategy == "fsdp" else actor.megatron.dtype)


def find_source(checkpoint: Path, model: Path | None = None, config_file: Path | None = None) -> Source:
    """Return the checkpoint and the configuration to load it with.

    Args:
        checkpoint: Folder of a checkpoint, or of a run.
        model: Model folder. None: the model folder of the run's configuration.
        config_file: Configuration of the run. None: ``config.yaml`` in the folder of the run.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or damaged.
        ConfigError: The configuration cannot be read.
        ModelError: The model folder does not exist.
    """
    folder = find_checkpoint(checkpoint.expanduser())
    file = config_file or folder.absolute().parent / CONFIG
    saved = _read_config(file)
    settings = _composed({key: OmegaConf.select(saved, key) for key in COPIED if _has(saved, key)})
    OmegaConf.update(settings, STRATEGY, _strategy(folder))
    path = model or Path(_select(saved, MODEL_PATH, file)).expanduser()
    if not (path / "config.json").is_file():
        raise ModelError(
            f"the model folder of the run, {path}, has no config.json; the export copies tokenizer and configuration "
            "from it",
            remedy="give its place now with --model FOLDER",
            path=path,
            names=("config.json",),
        )
    OmegaConf.update(settings, MODEL_PATH, str(path))
    stop_ids = tuple(_read_fields(folder, folder / TRAINER).get("stop_token_ids", ()))
    return Source(
        checkpoint=folder, config=with_data_types(to_config(settings), "cuda"), model=path, stop_token_ids=stop_ids
    )


def with_float32(source: Source) -> Source:
    """Return a source of which the FSDP backend exports the float32 weights of its checkpoints.

    Weights in a checkpoint of Megatron have the type of the run.
    """
    actor = source.config.actor_rollout_ref.actor
    fsdp = dataclasses.replace(actor.fsdp_config, dtype="float32")
    settings = dataclasses.replace(source.config.actor_rollout_ref, actor=dataclasses.replace(actor, fsdp_config=fsdp))
    return dataclasses.replace(source, config=dataclasses.replace(source.config, actor_rollout_ref=settings))


def _strategy(folder: Path) -> str:
    """Return the backend that saved a checkpoint."""
    return str(_read_fields(folder, folder / ACTOR_METADATA).get("backend", "megatron"))


def _read_fields(folder: Path, file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a checkpoint."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        what = f"{file} is damaged ({error})"
        raise CheckpointError(what, remedy="use another checkpoint of the run", path=folder) from error


def _read_config(file: Path) -> DictConfig:
    try:
        config = OmegaConf.load(file)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        what = f"the configuration of the run, {file}, cannot be read ({error})"
        raise ConfigError(what, remedy="give it with --config FILE", keys=("--config",)) from error
    if not isinstance(config, DictConfig):
        remedy = "give the config.yaml of the run with --config FILE"
        raise ConfigError(f"{file} is not a configuration of a run", remedy=remedy, keys=("--config",))
    return config


def _has(config: DictConfig, key: str) -> bool:
    return OmegaConf.select(config, key) is not None


def _select(config: DictConfig, key: str, file: Path) -> str:
    try:
        value = OmegaConf.select(config, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        what = f"{file}: {key} cannot be resolved ({error})"
        raise ConfigError(what, remedy="give --model FOLDER", keys=(key,)) from error
    if value is None:
        raise ConfigError(f"{file} has no {key}", remedy="give --model FOLDER", keys=(key,))
    return str(value)


def _composed(values: dict[str, Any]) -> DictConfig:
    """Return the default configuration with the values of the run. Keys of the data and so on are not used."""
    composed = compose_config("on_policy_distill_trainer")
    for key, value in values.items():
        OmegaConf.update(composed, key, value)
    fill_missing_keys(composed)
    return composed
