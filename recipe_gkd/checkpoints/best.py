"""Selection of a run's best weights by ``trainer.best_metric``."""

from __future__ import annotations

from collections.abc import Mapping

from recipe_gkd.checkpoints.state import Best


class BestTracker:
    """Record of the weights with the highest value of a metric.

    Attributes:
        current: Best weights so far. None before the first validation, or without a metric.
    """

    def __init__(self, metric: str | None, best: Best | None) -> None:
        self._metric, self.current = metric, best

    def observe(self, metrics: Mapping[str, float], step: int, *, has_checkpoint: bool = True) -> Best | None:
        """Compare the weights of ``step`` with the best ones.

        Args:
            metrics: Metrics of these weights.
            step: Number of optimizer steps of these weights.
            has_checkpoint: False for initial weights that the run has no checkpoint of. A later checkpoint is the best
                only if its value is higher.

        Returns:
            The new best if these weights are better than all before, else None.
        """
        if self._metric is None or (self.current is not None and metrics[self._metric] <= self.current.value):
            return None
        self.current = Best(self._metric, metrics[self._metric], step, has_checkpoint)
        return self.current

    def is_best(self, step: int) -> bool:
        """Return True if the weights of ``step`` are the best so far."""
        return self.current is not None and self.current.step == step
