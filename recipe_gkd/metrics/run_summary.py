"""Summary that a run logs at its end: steps, time, distillation loss, validation, and the files that it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipe_gkd.metrics.advice.measured_stages import WAITS

STEP, LOSS = "timing/step", "actor/kl_loss"
ACTIVITIES = {
    "timing/update_actor": "updates",
    **{name: f"waiting for {stage}" for stage, names in WAITS.items() for name in names},
    "timing/validate": "validation",
    "timing/save_checkpoint": "checkpoints",
}
"""Metric with the seconds that the trainer spends in a step -> name of the activity."""
MAX_VALIDATION_ROWS = 8


class RunSummary:
    """First and last values of a run's metrics, and the sums of its times, over all restarts of the actor ranks.

    Example::

        summary = RunSummary("jsd")
        summary.observe(1, metrics)     # after each step, and after a validation before the first step
        print(summary.render(saved=folder / "global_step_40", resumed_from=None))
    """

    def __init__(self, loss_name: str) -> None:
        self._loss_name = loss_name
        self._steps: list[int] = []
        self._seconds: dict[str, float] = {}
        self._ends: dict[str, list[tuple[int, float]]] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step.

        Args:
            step: Number of the step.
            metrics: Metrics by name. Without ``timing/step`` they belong to a validation.
        """
        if STEP in metrics:
            self._steps.append(step)
            for name in (STEP, *ACTIVITIES):
                self._seconds[name] = self._seconds.get(name, 0.0) + metrics.get(name, 0.0)
        for name, value in metrics.items():
            if name == LOSS or name.startswith("val/"):
                self._ends[name] = [*self._ends.get(name, [])[:1], (step, value)]

    def render(self, *, saved: Path | None, resumed_from: Path | None) -> str:
        """Return the summary as a table of two columns.

        Args:
            saved: Newest checkpoint that the run has saved since it was started or restarted last. None: none.
            resumed_from: Checkpoint that it has loaded then. None: the model folder.
        """
        rows = [*self._step_rows(), *self._value_rows(), *_file_rows(saved, resumed_from)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)

    def _step_rows(self) -> list[tuple[str, str]]:
        if not self._steps:
            return [("steps", "none")]
        total_s = self._seconds[STEP]
        shares: dict[str, float] = {}
        for name, activity in ACTIVITIES.items():
            shares[activity] = shares.get(activity, 0.0) + self._seconds[name] / max(total_s, 1e-9)
        shares["other"] = max(0.0, 1 - sum(shares.values()))
        parts = [f"{activity} {share:.0%}" for activity, share in sorted(shares.items(), key=lambda item: -item[1])]
        n_repeated = len(self._steps) - len(set(self._steps))
        repeated = f", {n_repeated} repeated" if n_repeated else ""
        return [
            ("steps", f"{len(self._steps)} ({min(self._steps)} to {max(self._steps)}{repeated})"),
            ("time", f"{_duration(total_s)}, {total_s / len(self._steps):.2f} s per step"),
            ("the trainer's time", ", ".join(part for part in parts if not part.endswith(" 0%"))),
        ]

    def _value_rows(self) -> list[tuple[str, str]]:
        names = sorted(name for name in self._ends if name != LOSS)[:MAX_VALIDATION_ROWS]
        titles = ([(LOSS, f"loss ({self._loss_name})")] if LOSS in self._ends else []) + [
            (name, name) for name in names
        ]
        return [(title, _first_and_last(self._ends[name])) for name, title in titles]


def _file_rows(saved: Path | None, resumed_from: Path | None) -> list[tuple[str, str]]:
    if saved is None:
        before = "none (trainer.save_freq)" if resumed_from is None else f"{resumed_from} (resumed from)"
        return [("checkpoint", before)]
    model = saved / "huggingface"
    return [("checkpoint", str(saved)), *([("trained model", str(model))] if model.is_dir() else [])]


def _first_and_last(ends: list[tuple[int, float]]) -> str:
    return " -> ".join(f"{value:.4f} (step {step})" for step, value in ends)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
