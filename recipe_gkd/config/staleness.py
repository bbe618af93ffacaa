"""The bound on staleness that a schedule implies."""

from __future__ import annotations

from recipe_gkd.config.schema import TrainerConfig

MAX_STALENESS = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
"""``trainer.scheduler`` -> updates that the weights that generate may be behind; ``n_step_off`` has a key for it."""



def staleness_bound(trainer: TrainerConfig) -> int:
    """Of the schedule that the configuration chooses."""
    return MAX_STALENESS.get(trainer.scheduler, trainer.max_staleness or 0)
