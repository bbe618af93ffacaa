"""Maximum policy lag of each schedule."""

from __future__ import annotations

from recipe_gkd.config.schema import Scheduler, TrainerConfig

# Maximum policy lag in optimizer steps. The lag of n_step_off is trainer.max_staleness.
MAX_STALENESS: dict[Scheduler, int] = {"sync": 0, "one_step_off": 1, "two_step_off": 2}


def staleness_bound(trainer: TrainerConfig) -> int:
    """Return the maximum policy lag of the configured schedule, in optimizer steps."""
    return MAX_STALENESS.get(trainer.scheduler, trainer.max_staleness or 0)
