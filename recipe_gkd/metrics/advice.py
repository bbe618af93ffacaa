"""One line when a bottleneck lasts: what waits for what, how long, and what to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain

from recipe_gkd.metrics.changes import (
    NEEDED,
    WAITS,
    ResourceLayout,
    WhatIf,
    larger_buckets,
    mean,
    more_devices,
    no_cost_changes,
    stage_seconds,
    usual,
    waited,
)

LASTS = 10
"""Steps that a bottleneck lasts before anything is said."""
REPEAT = 100
"""Steps before it is said again."""
WAITING = 0.15
"""Share of a step that the trainer may wait for one thing."""
IDLE = 0.3
"""Share of a step that the rollout pool may idle while the trainer is at work all the time."""
WORTHWHILE = 0.05
"""Share of a step that a change must save."""

WAITS_FOR = {"generation": "answers", "teacher": "the teacher", "sync": "weights to be sent", "reward": "rewards"}
FASTER_REWARDS = "more processes (custom_reward_function.num_workers), or a faster function, would make it shorter"


class Advisor:
    """Watches the metrics of the last steps."""

    def __init__(self, setup: ResourceLayout) -> None:
        self._setup = setup
        self._steps: deque[Mapping[str, float]] = deque(maxlen=LASTS)
        self._began = False
        self._bottleneck: str | None = None
        self._for_steps = 0
        self._said_at: dict[str, int] = {}

    def observe(self, metrics: Mapping[str, float], step: int) -> str | None:
        """The advice that is due after this step, if any."""
        if any(name not in metrics for name in NEEDED) or "timing/validate" in metrics:  # not as the others are
            return None
        if not self._began:  # the first step fills the pipeline
            self._began = True
            return None
        self._steps.append(metrics)
        steps = usual(self._steps)
        bottleneck = find_bottleneck(steps)
        self._for_steps = self._for_steps + 1 if bottleneck == self._bottleneck else 1
        self._bottleneck = bottleneck
        if bottleneck is None or self._for_steps < LASTS:
            return None
        if step - self._said_at.get(bottleneck, -REPEAT) < REPEAT:
            return None
        self._said_at[bottleneck] = step
        advice = FASTER_REWARDS if bottleneck == "reward" else advise(self._setup, steps)
        return f"{describe(bottleneck, steps)}; {advice}"


def find_bottleneck(steps: Sequence[Mapping[str, float]]) -> str | None:
    """What the trainer waits for most, if that is much; or ``update`` if it waits for little but the workers idle."""
    seconds = mean(steps, "timing/step")
    shares = {what: waited(steps, what) / seconds for what in WAITS}
    longest = max(shares, key=lambda name: shares[name])
    if shares[longest] > WAITING:
        return longest
    if sum(shares.values()) < WAITING and mean(steps, "perf/idle_rollout") > IDLE:
        return "update"
    return None


def describe(bottleneck: str, steps: Sequence[Mapping[str, float]]) -> str:
    seconds = mean(steps, "timing/step")
    idle = ", ".join(f"{pool} {mean(steps, f'perf/idle_{pool}'):.0%}" for pool in ("actor", "rollout", "teacher"))
    if bottleneck == "update":
        update = mean(steps, "timing/update_actor")
        return (
            f"the rollout workers wait for the actor: an update takes {update:.3g} s of {seconds:.3g} s (idle: {idle})"
        )
    wait = waited(steps, bottleneck)
    share, what = f"{wait / seconds:.0%}", WAITS_FOR[bottleneck]
    return f"the trainer waits {wait:.3g} s of a step of {seconds:.3g} s, {share}, for {what} (idle: {idle})"


def advise(setup: ResourceLayout, steps: Sequence[Mapping[str, float]]) -> str:
    """The change that the model expects most of; more devices only if nothing else is worth it."""
    stages, measured = stage_seconds(steps), mean(steps, "timing/step")
    modeled = setup.expected(stages, stages)

    def saved(change: WhatIf) -> float:
        return 1 - change.seconds / modeled

    def worth(change: WhatIf) -> float:
        return saved(change) / 2 if change.at_best else saved(change)

    without_devices = chain(no_cost_changes(setup, stages), larger_buckets(setup, stages, steps))
    for changes in (without_devices, more_devices(setup, stages)):
        best = max(changes, key=worth, default=None)
        if best is not None and worth(best) >= WORTHWHILE:
            at_best = " at best" if best.at_best else ""
            return f"{best.text} would make it {measured * (1 - saved(best)):.3g} s{at_best}, {saved(best):.0%} less"
    if setup.core_seconds(stages) >= modeled * (1 - WORTHWHILE):
        return f"all {setup.cores:g} cores are at work: only more or faster ones would make it shorter"
    return f"no other split, schedule or number of workers would save {WORTHWHILE:.0%} of it"
