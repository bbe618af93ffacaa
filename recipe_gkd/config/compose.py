"""Composition of the YAML files with Hydra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe_gkd.config.key_types import keys_of_type, known_keys
from recipe_gkd.config.overrides import CheckedOverrides, OverrideRules
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


def config_folder(folder: Path | None) -> Path:
    """Return the absolute path of a config folder. None: the folder of this package."""
    return (folder or config_dir()).expanduser().resolve()


def compose_config(name: str, overrides: Sequence[str] = (), folder: Path | None = None) -> DictConfig:
    """Return the composed YAML before conversion, with unresolved interpolations.

    A config file in a user's ``folder`` can name the config files of this package in its defaults list.

    Raises:
        ConfigError: The file does not exist, or overrides are malformed or have unknown keys. It has the keys of all
            these overrides.
    """
    folder = config_folder(folder)
    checked = check_overrides(overrides, folder)
    if checked.problems:
        raise ConfigError.joined(checked.problems)
    return compose_accepted(name, checked.accepted, folder)


def default_values(name: str = DEFAULT_CONFIG) -> Mapping[str, Any]:
    """Return the values in one of the package's config files, which is composed once in a process."""
    return _package_values(name, config_dir())


def _values(name: str, folder: Path) -> Mapping[str, Any]:
    values: Any = OmegaConf.to_container(compose_accepted(name, (), folder), resolve=False)
    return dict(values)


_package_values = cache(_values)


def compose_accepted(name: str, overrides: Sequence[str], folder: Path) -> DictConfig:
    """Compose a configuration with overrides that :func:`check_overrides` accepted.

    Raises:
        ConfigError: The file does not exist, or a value cannot be merged.
    """
    name = name.removesuffix(".yaml")
    _check_file(name, folder)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            search_path = [] if folder == config_dir() else [f"hydra.searchpath=[file://{config_dir()}]"]
            return compose(name, overrides=[*search_path, *overrides])
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a group that is not a name
        what = f"{name}.yaml cannot be composed with these overrides: {one_line(error)}"
        key = error.full_key if isinstance(error, OmegaConfBaseException) else None
        raise ConfigError(what, keys=(key,) if key else ()) from error


def missing_keys(composed: DictConfig) -> list[str]:
    """Return the keys without a value, sorted.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    with interpolation_errors():
        return sorted(OmegaConf.missing_keys(composed))


@contextmanager
def interpolation_errors() -> Iterator[None]:
    """Raise a :class:`ConfigError` for an interpolation that OmegaConf cannot resolve in the context."""
    try:
        yield
    except OmegaConfBaseException as error:
        what = f"an interpolation in the configuration cannot be resolved: {one_line(error)}"
        raise ConfigError(what, keys=(error.full_key,) if error.full_key else ()) from error


def fill_missing_keys(composed: DictConfig) -> None:
    """Give the keys without a value the text ``none``, for a command that does not read them.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    for key in missing_keys(composed):
        OmegaConf.update(composed, key, "none")


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


def keys_set_in_files(name: str, folder: Path) -> set[str]:
    """Return the keys to which the files in a user's folder give another value than this package's files."""
    if folder == config_dir():
        return set()
    own, package = _values(name, folder), default_values(_package_base(name, folder))
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


def check_overrides(overrides: Sequence[str], folder: Path) -> CheckedOverrides:
    """Check the keys of overrides for the config files in a folder, and translate keys of other projects."""

    def is_group(name: str) -> bool:
        return any((source / name.replace(".", "/")).is_dir() for source in (folder, config_dir()))

    free_form, lists = keys_of_type(dict), keys_of_type(list)
    return OverrideRules(known=known_keys(), free_form=free_form, is_group=is_group, lists=lists).check(overrides)


def one_line(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())
