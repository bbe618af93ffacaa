"""What a recorded run would have taken with other pools and schedules: its stage times, through the real schedule.

Generation and updates are taken to be shared out without loss: a pool of twice the size takes half the time. Of the
answers only the shortest, the mean and the longest are recorded, so that their times in a batch are a curve through
these three.
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
from recipe_gkd.metrics.changes import NEEDED, ResourceLayout, mean, splits_of, stage_seconds, usual
from recipe_gkd.pipeline.interface import PipelineConfig

ANSWERS_PER_LANE = 16
MICROBATCHES = 8
"""Requests to each teacher worker for a batch."""
MAX_STEPS = 40
"""The last ones of a run are replayed."""
GENERATE_MIN, GENERATE_MEAN, GENERATE_MAX = (f"timing/generate_sequences_{what}" for what in ("min", "mean", "max"))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is changed about the run."""

    staleness: int
    split: str = ""
    """The keys; empty: as it was."""
    rollout: float = 1.0
    """Size of the pool, over that of the run."""
    actor: float = 1.0
    n_teachers: int = 1


def replay(path: Path, *, actor: int | None, rollout: int | None, teacher: int | None) -> str:
    """The report, as lines. Raises :class:`DataError` or :class:`ConfigError` if it cannot be made."""
    steps = read_steps(path)
    setup = read_setup(path.parent / "config.yaml", steps, actor=actor, rollout=rollout, teacher=teacher)
    kept = usual(steps[1:] or steps)[-MAX_STEPS:]  # the first step fills the pipeline
    measured = mean(kept, "timing/step")
    as_it_was = Variant(staleness=setup.staleness, n_teachers=setup.n_teachers)
    predicted = step_seconds(kept, setup, as_it_was)
    lines = [
        f"{path}: {len(kept)} of {len(steps)} steps, less the first and those of twice the median; {_describe(setup)}",
        f"measured {measured:.3f} s a step, replayed {predicted:.3f} s ({predicted / measured - 1:+.1%})",
        "",
        f"{'schedule':<18}{'split':<52}{'teacher workers':>16}{'step s':>10}{'saved':>8}",
    ]
    bounds = sorted({*MAX_STALENESS.values(), setup.staleness})
    splits = [("", 1.0, 1.0), *splits_of(setup)]
    counts = [setup.n_teachers, setup.n_teachers + 1, 2 * setup.n_teachers]
    variants = [
        Variant(staleness=bound, split=split, rollout=r, actor=a, n_teachers=n)
        for bound, (split, r, a), n in itertools.product(bounds, splits, sorted(set(counts)))
    ]
    seconds = {variant: step_seconds(kept, setup, variant) for variant in variants}
    for variant in variants:
        mark = "  <- the run" if variant == as_it_was else ""
        lines.append(_row(variant, seconds[variant], predicted) + mark)
    best = min(seconds.values())
    cheapest = next(variant for variant in sorted(variants, key=_cost) if seconds[variant] <= 1.05 * best)
    lines += [
        "",
        "within 5 % of the best, with as little change as that takes:",
        _row(cheapest, seconds[cheapest], predicted),
    ]
    return "\n".join(lines)


def read_steps(path: Path) -> list[dict[str, float]]:
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not the metrics.jsonl of a run, a JSON object a line: {error}") from error
    steps = [step for step in steps if "timing/step" in step or "timing/validate" not in step]  # validated before them
    needed = (*NEEDED, GENERATE_MIN, GENERATE_MAX)
    if not steps:
        raise DataError(f"{path} has no step; give the metrics.jsonl of a run that made some")
    if missing := sorted({name for name in needed for step in steps if name not in step}):
        raise DataError(f"{path} has steps without {', '.join(missing)}; replay needs a run of this version")
    return steps


def read_setup(
    path: Path, steps: Sequence[Mapping[str, float]], *, actor: int | None, rollout: int | None, teacher: int | None
) -> ResourceLayout:
    """From the run's ``config.yaml``, or from the command line where that is missing."""
    given = [
        name for name, value in (("actor", actor), ("rollout", rollout), ("teacher", teacher)) if value is not None
    ]
    if path.is_file():
        if given:
            raise ConfigError(f"--{given[0]} was given, but {path} says what the run had; leave it out")
        config = OmegaConf.load(path)
        assert isinstance(config, DictConfig)
        return ResourceLayout.of(to_config(config))
    if actor is None or rollout is None or teacher is None:
        raise ConfigError(f"there is no {path}; give --actor, --rollout and --teacher: devices, devices, workers")
    staleness = max(int(step.get("training/staleness_max", 1)) for step in steps)
    return ResourceLayout(staleness=staleness, actor=(1, actor), rollout=(1, rollout), n_teachers=teacher)


def step_seconds(steps: Sequence[Mapping[str, float]], setup: ResourceLayout, variant: Variant) -> float:
    """Seconds of a step in steady state."""
    n_replicas = max(1, setup.rollout[0] * setup.rollout[1] // setup.rollout_divisor)
    whole = stage_seconds(steps)
    alone = whole.latency / max(mean(steps, "timing/generate_sequences"), 1e-9)  # the rest was queueing
    syncs = [each["timing/sync_rollout_weights"] for each in steps if each["timing/sync_rollout_weights"] > 0]
    sync = statistics.fmean(syncs) if syncs else 0.0
    times = [batch_times(step, n_replicas, setup, variant, alone=alone, sync=sync) for step in steps]
    pools = Pools(n_replicas=n_replicas, n_slots=ANSWERS_PER_LANE, n_teachers=variant.n_teachers)
    pipeline_config = PipelineConfig(
        max_staleness=variant.staleness,
        n_replicas=n_replicas,
        capacity=n_replicas * ANSWERS_PER_LANE,
        requests_per_batch=variant.n_teachers * MICROBATCHES,
        inflight_update=setup.inflight and variant.staleness > 0,
    )
    warm_up = 2 * variant.staleness + 2

    async def run() -> float:
        course = await drive(Stages(lambda i: times[i % len(times)], pools), pipeline_config, 2 * warm_up + len(times))
        return (course.ended_at[warm_up + len(times) - 1] - course.ended_at[warm_up - 1]) / len(times)

    return virtual_time.run(run())


def batch_times(
    step: Mapping[str, float], n_replicas: int, setup: ResourceLayout, variant: Variant, *, alone: float, sync: float
) -> BatchTimes:
    """Of one recorded step, in the pools of the variant. ``alone``: the share of generation that was not queueing."""
    replicas = curve(n_replicas, step[GENERATE_MIN], step[GENERATE_MEAN], step[GENERATE_MAX])
    lengths = [step.get(f"response_seq_len/{what}", 1.0) for what in ("min", "average", "max")]
    shares = [length / max(lengths[2], 1.0) for length in curve(ANSWERS_PER_LANE, *lengths)]
    # the pipeline deals answers to lanes in turn
    responses = [
        alone * replicas[i % n_replicas] * shares[i // n_replicas] / variant.rollout for i in range(n_replicas * len(shares))
    ]
    own = stage_seconds([step])
    return BatchTimes(
        responses=responses,
        teacher=own.teacher * setup.n_teachers / variant.n_teachers,
        update=own.update / variant.actor,
        sync=sync,
    )


def curve(n: int, least: float, mean: float, most: float) -> list[float]:
    """``n`` numbers with this mean, falling from ``most`` to ``least``; all ``most`` if no such curve is there."""
    if n == 1 or most <= mean or mean <= least:
        return [most] * n
    places = [1 - i / (n - 1) for i in range(n)]
    low, high = 0.0, 64.0  # of the exponent: the larger, the smaller the mean
    for _ in range(50):
        power = (low + high) / 2
        too_large = statistics.fmean(least + (most - least) * place**power for place in places) > mean
        low, high = (power, high) if too_large else (low, power)
    return [least + (most - least) * place**high for place in places]


def _describe(setup: ResourceLayout) -> str:
    (actor_nodes, actor), (rollout_nodes, rollout) = setup.actor, setup.rollout
    return (
        f"staleness bound {setup.staleness}, actor {actor_nodes} x {actor}, rollout {rollout_nodes} x {rollout}, "
        f"teacher workers {setup.n_teachers}"
    )


def _row(variant: Variant, seconds: float, now: float) -> str:
    names = {bound: name for name, bound in MAX_STALENESS.items()}
    schedule = names.get(variant.staleness, f"n_step_off, {variant.staleness}")
    split = variant.split or "as it is"
    return f"{schedule:<18}{split:<52}{variant.n_teachers:>16}{seconds:>10.3f}{1 - seconds / now:>8.0%}"


def _cost(variant: Variant) -> tuple[int, int, bool]:
    """What one would rather not do, worst first: pay for teachers, train on older answers, change the split."""
    return variant.n_teachers, variant.staleness, bool(variant.split)
