"""Composition of this package's configurations from a cache.

Hydra reads all YAML files each time, which takes 0.2 s. The tests need a configuration more than a thousand times.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipe_gkd.config import compose

FOLDER = compose.config_dir()
compose_with_hydra = compose.compose_accepted


def compose_from_cache(name: str, overrides: Sequence[str], folder: Path) -> DictConfig:
    """Compose like ``recipe_gkd.config.compose``. Whatever is not simply a value of a key is left to Hydra."""
    if folder != FOLDER:
        return compose_with_hydra(name, overrides, folder)
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if any(override.is_sweep_override() or _selects_group(override.key_or_group) for override in parsed):
            return compose_with_hydra(name, overrides, folder)
        composed: DictConfig = pickle.loads(_pickled(name))
        ConfigLoaderImpl._apply_overrides_to_config(parsed, composed)
    except (HydraException, OmegaConfBaseException):
        return compose_with_hydra(name, overrides, folder)  # for its message
    return composed


def _selects_group(key: str) -> bool:
    return key == "hydra" or key.startswith("hydra.") or (FOLDER / key.replace(".", "/")).is_dir()


@cache
def _pickled(name: str) -> bytes:
    return pickle.dumps(compose_with_hydra(name, [], FOLDER))
