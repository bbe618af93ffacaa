"""Replay of a recorded run with other pools and schedules: its stage times are fed to the real schedule.

The replay assumes that generation and updates are divided without loss: a pool of twice the size takes half the time. A
run records only the shortest, the mean and the longest response time of a batch, so the replay interpolates the others.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import virtual_time
from omegaconf import DictConfig, OmegaConf
from pipeline_stages import BatchTimes, Pools, Stages, drive

from recipe_gkd.config.load import to_config
from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.metrics.advice.measured_stages import NEEDED, mean, stage_seconds, usual
from recipe_gkd.metrics.advice.resource_layout import ResourceLayout
from recipe_gkd.metrics.advice.what_if import splits_of
from recipe_gkd.pipeline.config import PipelineConfig

RESPONSES_PER_REPLICA = 16
REQUESTS_PER_TEACHER_WORKER = 8
MAX_REPLAYED_STEPS = 40  # the last steps of the run
NEARLY_BEST = 1.05  # factor of the best step time within which the cheapest variant is recommended
BISECTION_STEPS = 50
GENERATE_MIN, GENERATE_MEAN, GENERATE_MAX = (f"timing/generate_sequences_{name}" for name in ("min", "mean", "max"))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Change to the recorded run.

    Attributes:
        staleness: Maximum policy lag in optimizer steps.
        split: Keys of another split of the devices. Empty: the split of the run.
        rollout: Size of the rollout pool relative to the run.
        actor: Size of the actor pool relative to the run.
    """

    staleness: int
    split: str = ""
    rollout: float = 1.0
    actor: float = 1.0
    n_teachers: int = 1


def replay(path: Path, *, actor: int | None, rollout: int | None, teacher: int | None) -> str:
    """Return the report on a run.

    Args:
        path: ``metrics.jsonl`` of the run.
        actor: Number of actor devices. None: from the run's ``config.yaml``.
        rollout: Number of rollout devices. None: from the run's ``config.yaml``.
        teacher: Number of teacher workers. None: from the run's ``config.yaml``.

    Raises:
        DataError: The file is not the ``metrics.jsonl`` of a run, or lacks metrics.
        ConfigError: The resources of the run are unknown, or were given twice.
    """
    steps = read_steps(path)
    layout = read_layout(path.parent / "config.yaml", steps, actor=actor, rollout=rollout, teacher=teacher)
    kept = usual(steps[1:] or steps)[-MAX_REPLAYED_STEPS:]  # the first step fills the pipeline
    measured = mean(kept, "timing/step")
    unchanged = Variant(staleness=layout.staleness, n_teachers=layout.n_teachers)
    predicted = step_seconds(kept, layout, unchanged)
    lines = [
        f"{path}: {len(kept)} of {len(steps)} steps, without the first and steps above twice the median; "
        f"{_describe(layout)}",
        f"measured {measured:.3f} s a step, replayed {predicted:.3f} s ({predicted / measured - 1:+.1%})",
        "",
        f"{'schedule':<18}{'split':<52}{'teacher workers':>16}{'step s':>10}{'saved':>8}",
    ]
    bounds = sorted({*MAX_STALENESS.values(), layout.staleness})
    splits = [("", 1.0, 1.0), *splits_of(layout)]
    counts = [layout.n_teachers, layout.n_teachers + 1, 2 * layout.n_teachers]
    variants = [
        Variant(staleness=bound, split=split, rollout=r, actor=a, n_teachers=n)
        for bound, (split, r, a), n in itertools.product(bounds, splits, sorted(set(counts)))
    ]
    seconds = {variant: step_seconds(kept, layout, variant) for variant in variants}
    for variant in variants:
        mark = "  <- the run" if variant == unchanged else ""
        lines.append(_row(variant, seconds[variant], predicted) + mark)
    best = min(seconds.values())
    cheapest = next(variant for variant in sorted(variants, key=_cost) if seconds[variant] <= NEARLY_BEST * best)
    lines += [
        "",
        "smallest change within 5 % of the best:",
        _row(cheapest, seconds[cheapest], predicted),
    ]
    return "\n".join(lines)


def read_steps(path: Path) -> list[dict[str, float]]:
    """Return the metrics of all steps of a run.

    Raises:
        DataError: The file is not the ``metrics.jsonl`` of a run, or lacks metrics.
    """
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not the metrics.jsonl of a run with one JSON object per line: {error}") from error
    # A validation before the first step has a line without timing/step.
    steps = [step for step in steps if "timing/step" in step or "timing/validate" not in step]
    needed = (*NEEDED, GENERATE_MIN, GENERATE_MAX)
    if not steps:
        raise DataError(f"{path} has no step; give the metrics.jsonl of a run with at least one step")
    if missing := sorted({name for name in needed for step in steps if name not in step}):
        raise DataError(f"{path} has steps without {', '.join(missing)}; give a run of this version")
    return steps


def read_layout(
    path: Path, steps: Sequence[Mapping[str, float]], *, actor: int | None, rollout: int | None, teacher: int | None
) -> ResourceLayout:
    """Return the layout of the run's ``config.yaml``, or the layout of the arguments if the file does not exist.

    Raises:
        ConfigError: The file exists and arguments were given, or neither is the case.
    """
    given = [
        name for name, value in (("actor", actor), ("rollout", rollout), ("teacher", teacher)) if value is not None
    ]
    if path.is_file():
        if given:
            raise ConfigError(f"--{given[0]} was given, but {path} contains the layout of the run; leave it out")
        config = OmegaConf.load(path)
        assert isinstance(config, DictConfig)
        return ResourceLayout.of(to_config(config))
    if actor is None or rollout is None or teacher is None:
        raise ConfigError(f"there is no {path}; give --actor, --rollout (devices) and --teacher (workers)")
    staleness = max(int(step.get("training/staleness_max", 1)) for step in steps)
    return ResourceLayout(staleness=staleness, actor=(1, actor), rollout=(1, rollout), n_teachers=teacher)


def step_seconds(steps: Sequence[Mapping[str, float]], layout: ResourceLayout, variant: Variant) -> float:
    """Return the step time of a variant in steady state, in seconds."""
    n_replicas = max(1, layout.rollout[0] * layout.rollout[1] // layout.rollout_divisor)
    whole = stage_seconds(steps)
    alone = whole.latency / max(mean(steps, "timing/generate_sequences"), 1e-9)  # the rest is queuing
    syncs = [each["timing/sync_rollout_weights"] for each in steps if each["timing/sync_rollout_weights"] > 0]
    sync = statistics.fmean(syncs) if syncs else 0.0
    times = [batch_times(step, n_replicas, layout, variant, alone=alone, sync=sync) for step in steps]
    pools = Pools(n_replicas=n_replicas, n_slots=RESPONSES_PER_REPLICA, n_teachers=variant.n_teachers)
    pipeline_config = PipelineConfig(
        max_staleness=variant.staleness,
        n_replicas=n_replicas,
        capacity=n_replicas * RESPONSES_PER_REPLICA,
        requests_per_batch=variant.n_teachers * REQUESTS_PER_TEACHER_WORKER,
        inflight_update=layout.inflight and variant.staleness > 0,
    )
    warm_up = 2 * variant.staleness + 2

    async def run() -> float:
        course = await drive(Stages(lambda i: times[i % len(times)], pools), pipeline_config, 2 * warm_up + len(times))
        return (course.ended_at[warm_up + len(times) - 1] - course.ended_at[warm_up - 1]) / len(times)

    return virtual_time.run(run())


def batch_times(
    step: Mapping[str, float], n_replicas: int, layout: ResourceLayout, variant: Variant, *, alone: float, sync: float
) -> BatchTimes:
    """Return the stage times of a recorded step in the pools of a variant.

    Args:
        step: Metrics of the step.
        variant: Change to the run.
        alone: Fraction of the generation time that was not spent in a queue.
        sync: Time of a weight sync, in seconds.
    """
    replicas = curve(n_replicas, step[GENERATE_MIN], step[GENERATE_MEAN], step[GENERATE_MAX])
    lengths = [step.get(f"response_seq_len/{name}", 1.0) for name in ("min", "average", "max")]
    shares = [length / max(lengths[2], 1.0) for length in curve(RESPONSES_PER_REPLICA, *lengths)]
    # The pipeline assigns responses to replicas in turn.
    responses = [
        alone * replicas[i % n_replicas] * shares[i // n_replicas] / variant.rollout
        for i in range(n_replicas * len(shares))
    ]
    own = stage_seconds([step])
    return BatchTimes(
        responses=responses,
        teacher=own.teacher * layout.n_teachers / variant.n_teachers,
        update=own.update / variant.actor,
        sync=sync,
    )


def curve(n: int, least: float, mean: float, most: float) -> list[float]:
    """Return ``n`` numbers that fall from ``most`` to ``least`` and have this mean; all ``most`` if impossible."""
    if n == 1 or most <= mean or mean <= least:
        return [most] * n
    positions = [1 - i / (n - 1) for i in range(n)]
    low, high = 0.0, 64.0  # bounds of the exponent; a larger exponent gives a smaller mean
    for _ in range(BISECTION_STEPS):
        power = (low + high) / 2
        too_large = statistics.fmean(least + (most - least) * position**power for position in positions) > mean
        low, high = (power, high) if too_large else (low, power)
    return [least + (most - least) * position**high for position in positions]


def _describe(layout: ResourceLayout) -> str:
    (actor_nodes, actor), (rollout_nodes, rollout) = layout.actor, layout.rollout
    return (
        f"staleness bound {layout.staleness}, actor {actor_nodes} x {actor}, rollout {rollout_nodes} x {rollout}, "
        f"teacher workers {layout.n_teachers}"
    )


def _row(variant: Variant, seconds: float, now: float) -> str:
    names = {bound: name for name, bound in MAX_STALENESS.items()}
    schedule = names.get(variant.staleness, f"n_step_off, {variant.staleness}")
    split = variant.split or "unchanged"
    return f"{schedule:<18}{split:<52}{variant.n_teachers:>16}{seconds:>10.3f}{1 - seconds / now:>8.0%}"


def _cost(variant: Variant) -> tuple[int, int, bool]:
    # Sort key: teacher workers cost most, then staleness, then another split.
    return variant.n_teachers, variant.staleness, bool(variant.split)
