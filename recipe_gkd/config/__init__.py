"""Configuration: YAML files are composed, converted to the typed :class:`Config`, and validated as a whole."""

from recipe_gkd.config.compose import config_dir
from recipe_gkd.config.load import load_config
from recipe_gkd.config.schema import Config

__all__ = ["Config", "config_dir", "load_config"]
