"""Advice about lasting bottlenecks: one log line with the waiting time and the most promising change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain

from recipe_gkd.metrics.advice.measured_stages import NEEDED, WAITS, mean, stage_seconds, usual, waited
from recipe_gkd.metrics.advice.resource_layout import ResourceLayout
from recipe_gkd.metrics.advice.what_if import WhatIf, larger_buckets, more_devices, no_cost_changes

STEPS_BEFORE_ADVICE = 10
STEPS_BEFORE_REPEAT = 100
# The following thresholds are fractions of the step time.
MAX_WAIT = 0.15  # of the trainer for one stage
MAX_IDLE_ROLLOUT = 0.3  # of the rollout pool while the trainer does not wait
MIN_SAVING = 0.05  # of a change

WAITS_FOR = {
    "generation": "responses",
    "teacher": "the teacher",
    "sync": "the weight sync",
    "reward": "rewards",
}
FASTER_REWARDS = "more processes (custom_reward_function.num_workers) or a faster reward function would make it shorter"


class Advisor:
    """Observer of the step metrics that reports lasting bottlenecks."""

    def __init__(self, layout: ResourceLayout) -> None:
        self._layout = layout
        self._steps: deque[Mapping[str, float]] = deque(maxlen=STEPS_BEFORE_ADVICE)
        self._is_first_step = True
        self._bottleneck: str | None = None
        self._n_steps_with_bottleneck = 0
        self._reported_at: dict[str, int] = {}  # bottleneck -> step of the last advice

    def observe(self, metrics: Mapping[str, float], step: int) -> str | None:
        """Record the metrics of a step, and return the advice that is due, or None.

        Steps with a validation, and steps without the needed metrics, are ignored.

        Args:
            metrics: Complete metrics of the step.
            step: Number of the step, starting at 1.
        """
        if any(name not in metrics for name in NEEDED) or "timing/validate" in metrics:
            return None
        if self._is_first_step:  # it fills the pipeline
            self._is_first_step = False
            return None
        self._steps.append(metrics)
        steps = usual(self._steps)
        bottleneck = find_bottleneck(steps)
        self._n_steps_with_bottleneck = self._n_steps_with_bottleneck + 1 if bottleneck == self._bottleneck else 1
        self._bottleneck = bottleneck
        if bottleneck is None or self._n_steps_with_bottleneck < STEPS_BEFORE_ADVICE:
            return None
        if step - self._reported_at.get(bottleneck, -STEPS_BEFORE_REPEAT) < STEPS_BEFORE_REPEAT:
            return None
        self._reported_at[bottleneck] = step
        advice = FASTER_REWARDS if bottleneck == "reward" else advise(self._layout, steps)
        return f"{describe(bottleneck, steps)}; {advice}"


def find_bottleneck(steps: Sequence[Mapping[str, float]]) -> str | None:
    """Return the bottleneck of ``steps``.

    Returns:
        The stage that the trainer waits for most, if that is more than :data:`MAX_WAIT` of a step. ``"update"`` if the
        trainer hardly waits and the rollout workers are idle. None if there is no bottleneck.
    """
    step_s = mean(steps, "timing/step")
    shares = {stage: waited(steps, stage) / step_s for stage in WAITS}
    longest = max(shares, key=lambda name: shares[name])
    if shares[longest] > MAX_WAIT:
        return longest
    if sum(shares.values()) < MAX_WAIT and mean(steps, "perf/idle_rollout") > MAX_IDLE_ROLLOUT:
        return "update"
    return None


def describe(bottleneck: str, steps: Sequence[Mapping[str, float]]) -> str:
    """Return a sentence with the waiting time and the idle fractions of the pools."""
    step_s = mean(steps, "timing/step")
    idle = ", ".join(f"{pool} {mean(steps, f'perf/idle_{pool}'):.0%}" for pool in ("actor", "rollout", "teacher"))
    if bottleneck == "update":
        update_s = mean(steps, "timing/update_actor")
        return (
            f"the rollout workers wait for the actor: an update takes {update_s:.3g} s of a step of {step_s:.3g} s "
            f"(idle: {idle})"
        )
    wait_s = waited(steps, bottleneck)
    return (
        f"the trainer waits {wait_s:.3g} s of a step of {step_s:.3g} s, {wait_s / step_s:.0%}, for "
        f"{WAITS_FOR[bottleneck]} (idle: {idle})"
    )


def advise(layout: ResourceLayout, steps: Sequence[Mapping[str, float]]) -> str:
    """Return the change with the largest expected saving. More devices are proposed only if no other change helps."""
    stages, measured_s = stage_seconds(steps), mean(steps, "timing/step")
    modeled_s = layout.expected(stages, stages)

    def saving(change: WhatIf) -> float:
        return 1 - change.seconds / modeled_s

    def weighted_saving(change: WhatIf) -> float:
        return saving(change) / 2 if change.is_lower_bound else saving(change)

    without_devices = chain(no_cost_changes(layout, stages), larger_buckets(layout, stages, steps))
    for changes in (without_devices, more_devices(layout, stages)):
        best = max(changes, key=weighted_saving, default=None)
        if best is not None and weighted_saving(best) >= MIN_SAVING:
            at_best = " at best" if best.is_lower_bound else ""
            return (
                f"{best.text} would make it {measured_s * (1 - saving(best)):.3g} s{at_best}, {saving(best):.0%} less"
            )
    if layout.core_seconds(stages) >= modeled_s * (1 - MIN_SAVING):
        return f"all {layout.cores:g} cores are busy: only more or faster cores would make it shorter"
    return f"no other split, schedule or number of workers would save {MIN_SAVING:.0%} of it"
