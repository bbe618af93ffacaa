"""Time of the steps by stage, work of the stages, and busy shares of the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recipe_gkd.commands.report.series import Floats, Series
from recipe_gkd.metrics.steps import PARTS_OF_STEP

MAX_BARS = 80
WORK = {
    "generation": "timing/generate_sequences",
    "teacher": "timing/get_teacher_knowledge",
    "weight sync": "timing/sync_rollout_weights",
    "update of the student": "timing/update_actor",
}
"""Metric of the time for one batch by stage, waited for or not."""
STAGES = {
    "timing/update_actor": ("update of the student", 1),
    "timing/wait_prev_gen": ("waiting for generation", 2),
    "timing/wait_prev_teacher": ("waiting for the teacher", 3),
    "timing/wait_prev_prev_teacher": ("waiting for the teacher", 3),
    "timing/wait_sync": ("waiting for a weight sync", 4),
    "timing/wait_reward": ("waiting for rewards", 5),
    "timing/validate": ("validation", 6),
    "timing/save_checkpoint": ("checkpoints", 7),
    "timing/log": ("loggers and other", 8),
    "timing/other": ("loggers and other", 8),
}
"""Label and color of each part of ``timing/step``."""
POOLS = {"actor": "student (actor)", "rollout": "rollout engines", "teacher": "teacher"}


@dataclass(frozen=True)
class StageTimes:
    """Time of the steps by stage.

    Attributes:
        steps: Step numbers, [N].
        seconds: Seconds of each step by label, [N] each, without stages that took no time.
        colors: Number of the color by label.
    """

    steps: Floats
    seconds: dict[str, Floats]
    colors: dict[str, int]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of all steps by stage."""
        return {label: float(values.sum()) for label, values in self.seconds.items()}


def stage_times(series: Mapping[str, Series]) -> StageTimes | None:
    """Return the parts of all steps, None if the run has no ``timing/step``."""
    if (whole := series.get("timing/step")) is None:
        return None
    seconds: dict[str, Floats] = {}
    colors: dict[str, int] = {}
    for name in [*PARTS_OF_STEP, "timing/other"]:
        if (part := series.get(name)) is None:
            continue
        label, color = STAGES.get(name, (name.removeprefix("timing/"), 8))
        values = np.zeros(len(whole.steps))
        index = np.searchsorted(whole.steps, part.steps)
        is_known = index < len(whole.steps)
        is_known[is_known] = whole.steps[index[is_known]] == part.steps[is_known]
        values[index[is_known]] = np.maximum(part.values[is_known], 0)
        seconds[label] = seconds.get(label, 0) + values
        colors[label] = color
    if not any(values.sum() for values in seconds.values()):
        return StageTimes(whole.steps, {"not divided": whole.values}, {"not divided": 8})
    ordered = sorted(seconds, key=lambda label: colors[label])
    return StageTimes(whole.steps, {label: seconds[label] for label in ordered if seconds[label].sum()}, colors)


def mean_bars(times: StageTimes) -> tuple[Floats, dict[str, Floats], int]:
    """Return mean step and mean seconds by stage of at most :data:`MAX_BARS` bars, and the most steps of a bar."""
    n = len(times.steps)
    starts = np.unique(np.linspace(0, n, min(n, MAX_BARS), endpoint=False).astype(int))
    counts = np.diff([*starts, n])
    means = {label: np.add.reduceat(values, starts) / counts for label, values in times.seconds.items()}
    return np.add.reduceat(times.steps, starts) / counts, means, int(counts.max())


def stage_work(series: Mapping[str, Series]) -> list[tuple[str, float, float]]:
    """Return label, median and 95th percentile of the seconds for one batch of each stage."""
    return [
        (label, float(np.median(one.values)), float(np.percentile(one.values, 95)))
        for label, name in WORK.items()
        if (one := series.get(name)) is not None
    ]


def busy_shares(series: Mapping[str, Series]) -> list[tuple[str, float]]:
    """Return label and busy share, from 0 to 1, of each pool."""
    return [
        (label, float(np.clip(1 - one.values.mean(), 0, 1)))
        for pool, label in POOLS.items()
        if (one := series.get(f"perf/idle_{pool}")) is not None
    ]
