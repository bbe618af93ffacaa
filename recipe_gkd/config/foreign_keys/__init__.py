"""Keys of other projects, and what to write here instead. docs/migration.md has the same tables.

The names were read in public repositories between May and November 2026. After a change, write the tables with
``python -m recipe_gkd.config --migration``.
"""

from recipe_gkd.config.foreign_keys.common_names import COMMON_NAMES
from recipe_gkd.config.foreign_keys.entries import ForeignKey
from recipe_gkd.config.foreign_keys.nemo_rl import NEMO_RL
from recipe_gkd.config.foreign_keys.trl import TRL
from recipe_gkd.config.foreign_keys.verl import VERL, VERL_DISTILLATION
from recipe_gkd.config.foreign_keys.verl_gkd import VERL_GKD

PROJECTS = (VERL_GKD, VERL, VERL_DISTILLATION, TRL, NEMO_RL, COMMON_NAMES)

__all__ = ["PROJECTS", "ForeignKey"]
