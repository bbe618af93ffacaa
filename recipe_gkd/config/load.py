"""Compose the YAML files with Hydra and convert the result to :class:`~recipe_gkd.config.schema.Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from recipe_gkd.config.aliases import unknown_key_error
from recipe_gkd.config.key_types import accepts_null, plain_type, type_of
from recipe_gkd.config.overrides import CheckedOverrides, OverrideRules, leaf_names
from recipe_gkd.config.schema import Config
from recipe_gkd.config.unused_keys import unused_key_warnings
from recipe_gkd.config.validate import validate
from recipe_gkd.errors import ConfigError

DEFAULT_CONFIG = "on_policy_distill_trainer"
FORMER_CONFIGS = {
    "gkd_trainer": "on_policy_distill_trainer, or with one pool on_policy_distill_simple",
}
"""Names of verl's config files -> the config files here."""


def config_dir() -> Path:
    """Return the folder of the YAML files.

    Raises:
        ConfigError: The installation does not contain them.
    """
    folder = Path(__file__).resolve().parents[1] / "config_files"
    if not (folder / "on_policy_distill_trainer.yaml").is_file():
        raise ConfigError(
            f"no config files in {folder}",
            remedy="reinstall recipe_gkd, or pass --config-dir FOLDER",
            keys=("--config-dir",),
        )
    return folder.resolve()


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
        config: The configuration.
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
    folder = (folder or config_dir()).expanduser().resolve()
    checked = _check_overrides(overrides, folder)
    problems, composed, config = list(checked.problems), None, None
    try:
        composed = _compose(name, checked.accepted, folder)
        config, invalid = _convert(composed)
    except ConfigError as error:
        invalid = [error]
    problems += [_with_origin(error, checked) for error in invalid]
    if problems or composed is None or config is None:
        raise ConfigError.joined(problems)
    validate(config)
    unused = unused_key_warnings(config, checked.keys | _keys_set_in_files(name, folder))
    return LoadedConfig(config=config, composed=composed, warnings=[*checked.warnings, *unused])


def compose_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> DictConfig:
    """Return the composed YAML before conversion, with unresolved interpolations.

    A config file in a user's ``folder`` can name the config files of this package in its defaults list.

    Raises:
        ConfigError: The file does not exist, or overrides are malformed or have unknown keys. It has the keys of all
            these overrides.
    """
    folder = (folder or config_dir()).expanduser().resolve()
    checked = _check_overrides(overrides, folder)
    if checked.problems:
        raise ConfigError.joined(checked.problems)
    return _compose(name, checked.accepted, folder)


def _compose(name: str, overrides: Sequence[str], folder: Path) -> DictConfig:
    name = name.removesuffix(".yaml")
    _check_file(name, folder)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            search_path = [] if folder == config_dir() else [f"hydra.searchpath=[file://{config_dir()}]"]
            return compose(name, overrides=[*search_path, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        what = f"{name}.yaml cannot be composed with these overrides: {_one_line(error)}"
        key = error.full_key if isinstance(error, OmegaConfBaseException) else None
        raise ConfigError(what, keys=(key,) if key else ()) from error


def _check_file(name: str, folder: Path) -> None:
    """Raise an error, which lists the config files, if a config file does not exist."""
    if not folder.is_dir():
        raise ConfigError(
            f"the config folder {folder} does not exist (--config-path, --config-dir)",
            remedy=f"leave the option out to use the config files of this package: {_names_in(config_dir())}",
            keys=("--config-path", "--config-dir"),
        )
    if not (folder / f"{name}.yaml").is_file():
        former = FORMER_CONFIGS.get(name)
        hint = f"; {name}.yaml of verl's gkd is {former}" if former else ""
        raise ConfigError(
            f"there is no {name}.yaml in {folder}",
            remedy=f"choose one of: {_names_in(folder)}{hint}",
            keys=("--config-name",),
        )


def _names_in(folder: Path) -> str:
    return ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"


def _keys_set_in_files(name: str, folder: Path) -> set[str]:
    """Return the keys to which the files in a user's folder give another value than this package's files."""
    if folder == config_dir():
        return set()
    own, package = (
        OmegaConf.to_container(composed, resolve=False)
        for composed in (_compose(name, [], folder), _compose(_package_base(name, folder), [], config_dir()))
    )
    return {key for key in known_keys() if value_at(own, key) != value_at(package, key)}


def _package_base(name: str, folder: Path) -> str:
    """Return the name of the package's config file that a user's file extends, directly or through another file."""
    file = folder / f"{name.removesuffix('.yaml')}.yaml"
    listed = OmegaConf.select(OmegaConf.load(file), "defaults") or []
    for entry in (entry for entry in listed if isinstance(entry, str) and entry != "_self_"):
        if (folder / f"{entry}.yaml").is_file():
            return _package_base(entry, folder)
        if (config_dir() / f"{entry}.yaml").is_file():
            return entry
    return DEFAULT_CONFIG


def value_at(values: Any, name: str) -> Any:
    """Return the value of the key ``name`` in nested mappings, None if it is not there."""
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return None
        values = values[part]
    return values


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
    missing = sorted(OmegaConf.missing_keys(composed))
    problems = []
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
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        what = f"an interpolation in the configuration cannot be resolved: {_one_line(error)}"
        return None, [*problems, ConfigError(what, keys=(error.full_key,) if error.full_key else ())]
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
        if isinstance(got := value_at(values, name), bool) and not isinstance(attrgetter(name)(config), bool):
            or_null = ", or null" if accepts_null(type_of(name)) else ""
            problems.append(ConfigError(f"{name}: got {got}; input should be a number{or_null}", keys=(name,)))
    return problems


@cache
def known_keys(section: type = Config, prefix: str = "") -> Mapping[str, dataclasses.Field[Any]]:
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


@cache
def list_keys() -> frozenset[str]:
    """Return the names of the keys whose value is a list."""
    return frozenset(name for name in known_keys() if get_origin(plain_type(type_of(name))) is list)


def description(field: dataclasses.Field[Any]) -> str:
    """Return the description of a key."""
    info: Any = field.default  # pydantic keeps a field's Field(...) there
    return str(info.description)


# Sections in which users choose the names of the keys.
FREE_FORM_SECTIONS = (
    "actor_rollout_ref.actor.megatron.override_ddp_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.teacher.apply_chat_template_kwargs",
    "actor_rollout_ref.teacher.teachers",
    "custom_reward_function.functions",
    "custom_reward_function.kwargs",
    "data.apply_chat_template_kwargs",
    "ray_init.env_vars",
)


def _check_overrides(overrides: Sequence[str], folder: Path) -> CheckedOverrides:
    def is_group(name: str) -> bool:
        return any((source / name.replace(".", "/")).is_dir() for source in (folder, config_dir()))

    rules = OverrideRules(known=known_keys(), free_form=FREE_FORM_SECTIONS, is_group=is_group, lists=list_keys())
    return rules.check(overrides)


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
            name: value_at(detail["input"], name.removeprefix(f"{key}.")) for name in leaf_names(key, detail["input"])
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
