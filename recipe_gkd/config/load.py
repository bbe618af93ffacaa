"""Compose the YAML files with Hydra and convert the result to :class:`~recipe_gkd.config.schema.Config`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from recipe_gkd.config.schema import Config
from recipe_gkd.config.validate import validate
from recipe_gkd.errors import ConfigError


def config_dir() -> Path:
    """Return the folder of the YAML files.

    Raises:
        ConfigError: The installation does not contain them.
    """
    folder = Path(__file__).resolve().parents[1] / "config_files"
    if not (folder / "on_policy_distill_trainer.yaml").is_file():
        raise ConfigError(f"no config files in {folder}; reinstall recipe_gkd, or pass --config-dir FOLDER")
    return folder.resolve()


def load_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> Config:
    """Compose a configuration, convert it and validate it.

    Args:
        name: Name of a YAML file in the config folder, with or without ``.yaml``.
        overrides: Overrides of the form ``key=value``.
        folder: Config folder. None: the one of this package.

    Raises:
        ConfigError: The file does not exist, a key is unknown (the message names the nearest known one), a value has
            the wrong type or is out of range, a mandatory key is not set, or a combination of values cannot work.
    """
    config = to_config(compose_config(name, overrides, folder))
    validate(config)
    return config


def compose_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> DictConfig:
    """Return the composed YAML before conversion, with unresolved interpolations.

    A config file in a user's ``folder`` can name the config files of this package in its defaults list.

    Raises:
        ConfigError: The file does not exist, or an override is malformed or has an unknown key.
    """
    folder = (folder or config_dir()).resolve()
    name = name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise ConfigError(f"there is no {name}.yaml in {folder}; choose one of: {known}")
    _check_override_keys(overrides, folder)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            search_path = [] if folder == config_dir() else [f"hydra.searchpath=[file://{config_dir()}]"]
            free = tuple(key + separator for key in FREE_FORM_SECTIONS for separator in ".=")
            # Hydra adds a key that is not in the YAML files only with a ++ prefix.
            added = [f"++{override}" if override.startswith(free) else override for override in overrides]
            return compose(name, overrides=search_path + added)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{name}.yaml cannot be composed with these overrides: {_one_line(error)}") from error


def to_config(composed: DictConfig) -> Config:
    """Resolve interpolations and convert a composed configuration.

    Raises:
        ConfigError: A mandatory key is not set, or values have the wrong type or are out of range. The message lists
            all of them.
    """
    if missing := OmegaConf.missing_keys(composed):
        assignments = "\n".join(f"  {key}=..." for key in sorted(missing))
        raise ConfigError(f"these keys have no default and must be set; add to the command:\n{assignments}")
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"an interpolation in the configuration cannot be resolved: {_one_line(error)}") from error
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_conversion_message(detail) for detail in error.errors())) from error


def known_keys(section: type = Config, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return the schema field of every key by its dotted name.

    Args:
        section: Dataclass of the schema to start from.
        prefix: Dotted name of ``section``, with a trailing dot, or empty.
    """
    hints = get_type_hints(section)
    keys: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(section):
        name = prefix + field.name
        if dataclasses.is_dataclass(kind := hints[field.name]):
            assert isinstance(kind, type)
            keys |= known_keys(kind, name + ".")
        else:
            keys[name] = field
    return keys


def type_of(name: str) -> Any:
    """Return the type of the key ``name`` in the schema, with its annotations."""
    hint: Any = Config
    for part in name.split("."):
        hint = get_type_hints(hint, include_extras=True)[part]
    return hint


def description(field: dataclasses.Field[Any]) -> str:
    """Return the description of a key."""
    info: Any = field.default  # pydantic keeps a field's Field(...) there
    return str(info.description)


# Sections in which users choose the names of the keys.
FREE_FORM_SECTIONS = (
    "actor_rollout_ref.actor.megatron.override_ddp_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.teacher.teachers",
    "ray_init.env_vars",
)


def _check_override_keys(overrides: Sequence[str], folder: Path) -> None:
    # Hydra's own check does not name the nearest known key, and accepts any key with a + prefix.
    known = known_keys()
    sections = {key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)}
    try:
        parsed = OverridesParser.create().parse_overrides(overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(f"an override is not of the form key=value: {_one_line(error)}") from error
    for override in parsed:
        key = override.key_or_group.split("@")[0]
        group = (folder / key.replace(".", "/")).is_dir() or key.startswith("hydra")
        below = key.startswith(tuple(f"{free}." for free in FREE_FORM_SECTIONS))
        if not (group or key in known or key in sections or below):
            raise ConfigError(_unknown_key_message(key))


def _unknown_key_message(key: str) -> str:
    known = list(known_keys())
    closest = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not closest:  # the section may be wrong or missing
        closest = [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    hint = f"did you mean {closest[0]}?" if closest else "`python -m recipe_gkd.config` lists the keys"
    return f"unknown key {key}: {hint}"


def _conversion_message(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key_message(key)
    if detail["type"].startswith("missing"):
        return f"{key} is missing from the configuration; copy it from config/on_policy_distill_trainer.yaml"
    message = detail["msg"].removeprefix("Value error, ")
    if message == detail["msg"]:  # pydantic's own text
        message = message[0].lower() + message[1:]
    return f"{key}: got {detail['input']!r}; {message}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
