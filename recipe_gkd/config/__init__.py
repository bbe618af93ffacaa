"""The front door: YAML files -> composed -> converted to the typed :class:`Config` -> checked as a whole."""

from recipe_gkd.config.load import config_dir, load_config
from recipe_gkd.config.schema import Config

__all__ = ["Config", "config_dir", "load_config"]
