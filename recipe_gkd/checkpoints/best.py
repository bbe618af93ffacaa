"""Selection of a run's best weights by ``trainer.best_metric``."""

from __future__ import annotations

from collections.abc import Mapping

from recipe_gkd.checkpoints.state import Best


class BestTracker:
    """Record of the weights with the best value of a metric.

    Args:
        metric: Name of the metric. None: no weights are the best.
        best: Best weights of the run before its checkpoint.
        lower_is_better: True if the best value is the lowest.

    Attributes:
        current: Best weights so far. None before the first validation, or without a metric.
    """

    def __init__(self, metric: str | None, best: Best | None, *, lower_is_better: bool = False) -> None:
        self._metric, self.current, self._lower_is_better = metric, best, lower_is_better

    def observe(self, metrics: Mapping[str, float], step: int, *, has_checkpoint: bool = True) -> Best | None:
        """Compare the weights of ``step`` with the best ones. Metrics without the value are ignored.

        Args:
            metrics: Metrics of these weights.
            step: Number of optimizer steps of these weights.
            has_checkpoint: False for initial weights that the run has no checkpoint of. A later checkpoint is the best
                only if its value is better.

        Returns:
            The new best if these weights are better than all before, else None.
        """
        value = None if self._metric is None else metrics.get(self._metric)
        if self._metric is None or value is None:
            return None
        if self.current is not None:
            is_better = value < self.current.value if self._lower_is_better else value > self.current.value
            if not is_better:
                return None
        self.current = Best(self._metric, value, step, has_checkpoint)
        return self.current

    def is_best(self, step: int) -> bool:
        """Return True if the weights of ``step`` are the best so far."""
        return self.current is not None and self.current.step == step
