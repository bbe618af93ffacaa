"""The configuration as it is stored in the run folder."""

from __future__ import annotations

import logging
from operator import attrgetter
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe_gkd.config.data_types import AUTO
from recipe_gkd.config.key_types import known_keys
from recipe_gkd.config.keys import DTYPES, ENV_VARS, REWARD, TRACE_FILE
from recipe_gkd.config.schema import Config

log = logging.getLogger(__name__)

PRIVATE_KEYS = (ENV_VARS, f"{REWARD}.kwargs", f"{REWARD}.functions")
"""Keys whose values can be passwords or tokens. Variables of the environment in them are not written to files."""

_ABSENT = object()
_UNREADABLE = (OSError, ValueError, YAMLError, OmegaConfBaseException)  # ValueError: not UTF-8, or no mapping


def stored_config(composed: DictConfig) -> str:
    """Return a composed configuration as YAML that does not depend on the environment.

    Interpolations such as ``${oc.env:QUICKSTART_DIR}`` are replaced by their values, except in :data:`PRIVATE_KEYS`.
    ``trainer.trace_file`` is absolute, because the report may run in another folder.

    Args:
        composed: Valid configuration with unresolved interpolations.
    """
    stored = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
    for key in PRIVATE_KEYS:
        if isinstance(value := OmegaConf.select(composed, key), DictConfig):
            OmegaConf.update(stored, key, OmegaConf.to_container(value, resolve=False), merge=False)
    if trace_file := OmegaConf.select(stored, TRACE_FILE):
        OmegaConf.update(stored, TRACE_FILE, str(Path(trace_file).expanduser().absolute()))
    return OmegaConf.to_yaml(stored)


def with_chosen_types(stored: str, config: Config) -> str:
    """Return a stored configuration with the data types of ``config`` in the place of ``auto``."""
    values = OmegaConf.create(stored)
    for key in DTYPES:
        OmegaConf.update(values, key, attrgetter(key)(config))
    return OmegaConf.to_yaml(values)


def stored_types(file: Path) -> dict[str, str]:
    """Return the data types in a stored configuration by key; none if it cannot be read."""
    try:
        values = OmegaConf.load(file)
        found = {key: OmegaConf.select(values, key) for key in DTYPES}
    except _UNREADABLE:
        return {}
    return {key: dtype for key, dtype in found.items() if isinstance(dtype, str) and dtype != AUTO}


def changed_keys(before: str, now: str) -> list[str]:
    """Return the keys with different values in two stored configurations, as ``key: old value -> new value``.

    A key that the former one does not have, because an earlier version of this project wrote it, has not changed, nor
    has a data type that is ``auto`` now: a resumed run keeps its type.
    """
    old, new = (OmegaConf.create(text) for text in (before, now))
    found = []
    for key in known_keys():
        values = OmegaConf.select(old, key, default=_ABSENT), OmegaConf.select(new, key)
        is_kept = key in PRIVATE_KEYS or (key in DTYPES and values[1] == AUTO)
        if values[0] is not _ABSENT and values[0] != values[1] and not is_kept:
            found.append(f"{key}: {values[0]} -> {values[1]}")
    return found


def report_changes(file: Path, stored: str, what: str) -> None:
    """Warn of settings that a run in this folder did not have, and name the keys that start a new one.

    Args:
        file: Stored configuration of the run.
        stored: Configuration of this command, in the same form.
        what: What happened with the stored settings, for the message.
    """
    try:
        changes = changed_keys(file.read_text(encoding="utf-8"), stored) if file.is_file() else []
    except _UNREADABLE as error:
        log.warning("%s cannot be read, so its settings are not compared with this command's: %s", file, error)
        return
    if changes:
        log.warning(
            "the run in this folder %s with other settings: %s; to train from the start with these, set another "
            "trainer.experiment_name, or start over in the same folder with trainer.resume_mode=disable",
            what,
            "; ".join(changes),
        )
