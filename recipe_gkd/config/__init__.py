"""Configuration: YAML files are composed, converted to the typed :class:`Config`, and validated as a whole."""

from recipe_gkd.config.load import config_dir, load_config
from recipe_gkd.config.schema import Config

__all__ = ["Config", "config_dir", "load_config"]
