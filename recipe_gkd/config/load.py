"""Conversion of composed YAML to :class:`~recipe_gkd.config.schema.Config`, and its validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from recipe_gkd.config import compose
from recipe_gkd.config.aliases import unknown_key_error
from recipe_gkd.config.key_types import accepts_null, known_keys, type_of
from recipe_gkd.config.overrides import CheckedOverrides, leaf_names
from recipe_gkd.config.schema import Config
from recipe_gkd.config.unused_keys import unused_key_warnings
from recipe_gkd.config.validate import validate
from recipe_gkd.errors import ConfigError


def load_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> Config:
    """Compose a configuration, convert it and validate it.

    Args:
        name: Name of a YAML file in the config folder, with or without ``.yaml``.
        overrides: Overrides of the form ``key=value``.
        folder: Config folder. None: the one of this package.

    Raises:
        ConfigError: The file does not exist, a key is unknown (``suggestions`` has the nearest known ones), a value has
            the wrong type or is out of range, a mandatory key is not set, or a combination of values cannot work.
    """
    return read_config(name, overrides, folder).config


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A validated configuration and its source.

    Attributes:
        composed: The same as composed YAML, with unresolved interpolations.
        warnings: Messages about keys that have no effect, and about translated keys of other projects.
    """

    config: Config
    composed: DictConfig
    warnings: Sequence[str]


def read_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> LoadedConfig:
    """Compose, convert and validate a configuration, like :func:`load_config`, and find keys that have no effect.

    Raises:
        ConfigError: See :func:`load_config`. Unknown keys, missing keys and invalid values are in one error.
    """
    folder = compose.config_folder(folder)
    checked = compose.check_overrides(overrides, folder)
    problems, composed, config = list(checked.problems), None, None
    try:
        composed = compose.compose_accepted(name, checked.accepted, folder)
        config, invalid = _convert(composed)
    except ConfigError as error:
        invalid = [error]
    problems += [_with_origin(error, checked) for error in invalid]
    if problems or composed is None or config is None:
        raise ConfigError.joined(problems)
    validate(config)
    unused = unused_key_warnings(config, checked.keys | compose.keys_set_in_files(name, folder))
    return LoadedConfig(config=config, composed=composed, warnings=[*checked.warnings, *unused])


def to_config(composed: DictConfig) -> Config:
    """Resolve interpolations and convert a composed configuration.

    Raises:
        ConfigError: A mandatory key is not set, or values have the wrong type or are out of range. It has the keys of
            all of them.
    """
    config, problems = _convert(composed)
    if problems or config is None:
        raise ConfigError.joined(problems)
    return config


def _convert(composed: DictConfig) -> tuple[Config | None, list[ConfigError]]:
    """Return the configuration, or None and the errors of its keys and values."""
    problems: list[ConfigError] = []
    try:
        missing = compose.missing_keys(composed)
        with compose.interpolation_errors():
            values = OmegaConf.to_container(composed, resolve=True)
    except ConfigError as error:
        return None, [error]
    if missing:
        problems.append(
            ConfigError(
                "these keys have no default and must be set",
                remedy="add to the command:",
                details=tuple(f"  {key}=..." for key in missing),
                keys=tuple(missing),
            )
        )
    try:
        config: Config = TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        found = [detail for detail in error.errors() if _name_of(detail) not in missing]
        return None, problems + [each for detail in found for each in _conversion_errors(detail)]
    return config, problems + _booleans_for_numbers(values, config)


def _booleans_for_numbers(values: Any, config: Config) -> list[ConfigError]:
    """Return an error for each boolean that has become a number. ``false`` would become 0, which may mean anything."""
    problems = []
    for name in known_keys():
        if isinstance(got := compose.value_at(values, name), bool) and not isinstance(attrgetter(name)(config), bool):
            or_null = ", or null" if accepts_null(type_of(name)) else ""
            problems.append(ConfigError(f"{name}: got {got}; input should be a number{or_null}", keys=(name,)))
    return problems


def _with_origin(error: ConfigError, checked: CheckedOverrides) -> ConfigError:
    """Return an error with the overrides of other projects' keys that set its keys, and with their names."""
    origins = {key: checked.origins[key] for key in error.keys if key in checked.origins}
    lines = (f"{key} is set by {override}" for key, override in origins.items())
    names = (override.partition("=")[0] for override in origins.values())
    return error.replaced(details=(*error.details, *lines), keys=(*error.keys, *names))


def _name_of(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _conversion_errors(detail: ErrorDetails) -> list[ConfigError]:
    """Return the errors for a finding of pydantic."""
    key = _name_of(detail)
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        values = {
            name: compose.value_at(detail["input"], name.removeprefix(f"{key}."))
            for name in leaf_names(key, detail["input"])
        }
        values = {name: detail["input"] if name == key else value for name, value in values.items()}
        return [unknown_key_error(name, known_keys(), value) for name, value in values.items()]
    if detail["type"].startswith("missing"):
        remedy = "copy it from config/on_policy_distill_trainer.yaml"
        return [ConfigError(f"{key} is missing from the configuration", remedy=remedy, keys=(key,))]
    keys = (".".join(part for part in detail["loc"] if isinstance(part, str)),)  # without positions in lists
    if isinstance(reason := detail.get("ctx", {}).get("error"), ConfigError):  # of a validator of the schema
        return [ConfigError(f"{key}: {reason.what}", remedy=reason.remedy, keys=keys)]
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return [ConfigError(f"{key}: got {detail['input']!r}; {message}", keys=keys)]
