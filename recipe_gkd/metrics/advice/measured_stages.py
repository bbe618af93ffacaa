"""Stage times of a run, computed from the metrics of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from recipe_gkd.metrics.advice.step_time_model import StageSeconds

# Stage that the trainer can wait for -> metrics with the waiting time.
WAITS = {
    "generation": ("timing/wait_prev_gen",),
    "teacher": ("timing/wait_prev_teacher", "timing/wait_prev_prev_teacher"),
    "sync": ("timing/wait_sync",),
    "reward": ("timing/wait_reward",),
}
# Metrics that stage_seconds() requires in every step.
NEEDED = (
    "timing/step",
    "timing/wait_prev_gen",
    "timing/generate_sequences",
    "timing/generate_sequences_mean",
    "timing/get_teacher_knowledge",
    "timing/teacher_tail",
    "timing/sync_rollout_weights",
    "perf/idle_actor",
    "perf/idle_rollout",
    "perf/idle_teacher",
)

StepRecords = Sequence[Mapping[str, float]]


def usual(steps: StepRecords) -> list[Mapping[str, float]]:
    """Return the steps that took at most twice the median: without checkpoints and the first steps."""
    limit_s = 2 * statistics.median(step["timing/step"] for step in steps)
    return [step for step in steps if step["timing/step"] <= limit_s]


def mean(steps: StepRecords, name: str) -> float:
    """Return the mean of a metric over ``steps``. A step without the metric counts as 0."""
    return statistics.fmean(step.get(name, 0.0) for step in steps)


def waited(steps: StepRecords, stage: str) -> float:
    """Return the mean time per step, in seconds, that the trainer waited for ``stage``, a key of :data:`WAITS`."""
    return sum(mean(steps, name) for name in WAITS[stage])


def stage_seconds(steps: StepRecords) -> StageSeconds:
    """Return the mean stage times of ``steps``.

    A rollout worker counts as busy until its last response, so ``generate`` includes its stragglers. ``latency`` is
    the time of the slowest worker, without the time that the batch was queued behind another one.

    Args:
        steps: Metrics of at least one step, each with all of :data:`NEEDED`.
    """
    step, sync = mean(steps, "timing/step"), mean(steps, "timing/sync_rollout_weights")
    generate = max(0.0, _busy_s(steps, "rollout") - sync)
    latency = mean(steps, "timing/generate_sequences")
    slowest = latency - mean(steps, "timing/generate_sequences_mean")
    teacher, tail = _busy_s(steps, "teacher"), mean(steps, "timing/teacher_tail")
    return StageSeconds(
        generate=generate,
        latency=min(latency, generate + slowest),
        teacher=teacher,
        tail=min(tail, teacher),
        head_start=max(0.0, mean(steps, "timing/get_teacher_knowledge") - tail),
        update=max(0.0, step - sum(waited(steps, stage) for stage in WAITS)),
        sync=sync,
    )


def _busy_s(steps: StepRecords, pool: str) -> float:
    """Return the mean time per step, in seconds, that a pool was busy."""
    return statistics.fmean((1 - step[f"perf/idle_{pool}"]) * step["timing/step"] for step in steps)
