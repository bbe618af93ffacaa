"""Step time over its bound: the real schedule, driven by stages that only take time.

    python benchmarks/pipeline.py [--clock virtual] [--json FILE] [--shape S ...] [--schedule S ...]
    python benchmarks/pipeline.py --replay RUN/metrics.jsonl      what other pools and schedules would make of that run

For each shape of a load (how long a batch is generated, scored, trained on) and each schedule: the seconds of a step in
steady state over ``recipe_gkd.metrics.step_time_model.step_bound`` of the same stages, each measured alone, and against ``sync`` without
streaming, where the teacher gets whole batches. Every schedule runs twice: as shipped, with answers streamed to the
teacher as they finish (the main figures), and batch by batch, which is what the bound is about.

A sync (``--sync``: 3 % of a balanced stage) keeps the actor and the rollout workers from anything else, which the bound
does not count: where one of these two is the slowest stage, ``step_over_bound`` is at least 1 plus the sync's share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import statistics
import sys
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import virtual_time
from pipeline_replay import replay
from pipeline_stages import BatchTimes, Pools, Stages, drive, idle

from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.errors import GkdError
from recipe_gkd.metrics.step_time_model import step_bound
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.runtime.clock import now


@dataclass(frozen=True)
class Shape:
    """Stage times in units."""

    generate: float
    teacher: float
    update: float
    responses: str = "varied"
    """Seconds of a batch's answers: ``equal``; ``varied``, by 20 % about the mean; ``long_tailed``, lognormal."""


SHAPES = {
    "balanced": Shape(1, 1, 1),
    "generation_bound": Shape(2, 0.7, 0.7),
    "teacher_bound": Shape(0.7, 2, 0.7),
    "update_bound": Shape(0.7, 0.7, 2),
    "long_tailed": Shape(1, 1, 1, "long_tailed"),
    "balanced_equal": Shape(1, 1, 1, "equal"),
}
N_REQUESTS = 16
"""Of a batch to the teacher, when it streams."""
BATCH_SIZE = 64
SEED = 0
TICK_S = 0.05
N_ALONE = 3
"""Batches that the bound is measured on."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one shape, one schedule, streamed or batch by batch; ``idle``: shares of the steady state."""

    shape: str
    schedule: str
    streaming: bool
    step_s: float
    bound_s: float
    step_over_bound: float
    staleness: float
    idle_actor: float
    idle_rollout: float
    idle_teacher: float
    speedup_over_sync: float = math.nan
    """Over sync batch by batch."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How it is measured."""

    unit_s: float
    sync: float
    """Units."""
    n_steps: int
    """In steady state."""
    inflight: bool
    pools: Pools

    def times(self, shape: Shape) -> BatchTimes:
        """Answers of set proportions, scaled so that one batch alone is generated in the shape's time."""
        shares = answer_shares(shape.responses)
        trial = BatchTimes(responses=shares, teacher=0, update=0, sync=0)
        alone = virtual_time.run(Stages(lambda step: trial, self.pools).alone(1))[0]
        unit = self.unit_s
        return BatchTimes(
            responses=[share * shape.generate * unit / alone for share in shares],
            teacher=shape.teacher * unit,
            update=shape.update * unit,
            sync=self.sync * unit,
        )

    async def measure(self, shape: str, schedule: str, streaming: bool, times: BatchTimes) -> Result:
        staleness = MAX_STALENESS[schedule]
        pipeline_config = PipelineConfig(
            max_staleness=staleness,
            n_replicas=self.pools.n_replicas,
            capacity=self.pools.n_replicas * self.pools.n_slots,
            requests_per_batch=N_REQUESTS if streaming else 1,
            inflight_update=self.inflight and staleness > 0,
        )
        g, t, u, w = await _alone(times, self.pools, pipeline_config.requests_per_batch, whole_batches=not streaming)
        bound = step_bound(g, t, u, w, staleness)
        stages = Stages(lambda step: times, self.pools, whole_batches=not streaming)
        warm_up = 2 * staleness + 2
        course = await drive(stages, pipeline_config, warm_up + self.n_steps + staleness)
        since, until = course.ended_at[warm_up - 1], course.ended_at[warm_up + self.n_steps - 1]
        step_s = (until - since) / self.n_steps

        idle_shares = idle(stages.timeline, stages, since, until)
        return Result(
            shape=shape,
            schedule=schedule,
            streaming=streaming,
            step_s=step_s,
            bound_s=bound,
            step_over_bound=step_s / bound,
            staleness=statistics.mean(course.staleness[warm_up:]),
            idle_actor=idle_shares["perf/idle_actor"],
            idle_rollout=idle_shares["perf/idle_rollout"],
            idle_teacher=idle_shares["perf/idle_teacher"],
        )


async def _alone(times: BatchTimes, pools: Pools, n_requests: int, whole_batches: bool) -> list[float]:
    """Seconds of generate, teacher, update and sync for one batch: means, since a real clock's timers come late."""
    stages = [Stages(lambda step: times, pools, whole_batches=whole_batches) for _ in range(N_ALONE)]
    return [statistics.fmean(stage) for stage in zip(*[await each.alone(n_requests) for each in stages], strict=True)]


def answer_shares(kind: str) -> list[float]:
    """Relative seconds of a batch's answers."""
    rng = random.Random(SEED)
    draw = {
        "equal": lambda: 1.0,
        "varied": lambda: rng.uniform(0.8, 1.2),
        "long_tailed": lambda: min(8.0, rng.lognormvariate(0, 1)),
    }[kind]
    return [draw() for _ in range(BATCH_SIZE)]


async def measure_all(bench: Bench, times: dict[str, BatchTimes], schedules: list[str]) -> list[Result]:
    """``times``: of each shape. All at once: they only wait, so that there is time for steps that are long enough for
    timers and a busy machine to matter little.
    """
    cases = [(shape, schedule, streamed) for shape in times for schedule in schedules for streamed in (True, False)]
    yardsticks = [(shape, "sync", False) for shape in times]
    everything = list(dict.fromkeys(cases + yardsticks))
    measured = await asyncio.gather(*(bench.measure(*case, times[case[0]]) for case in everything))
    found = dict(zip(everything, measured, strict=True))
    return [
        replace(found[case], speedup_over_sync=found[case[0], "sync", False].step_s / found[case].step_s)
        for case in cases
    ]


async def watched(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and by how many seconds a timer was late on average while it was made: what others do to a core."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            due = now() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(now() - due)

    watcher = asyncio.ensure_future(watch())
    result = await work
    watcher.cancel()
    return result, statistics.fmean(late or [0.0])


def summary(found: list[Result]) -> dict[str, float]:
    """``<shape>/<schedule>/<figure>`` as shipped, ``<shape>/<schedule>/batchwise/<figure>`` without streaming."""
    flat = {}
    for result in found:
        prefix = f"{result.shape}/{result.schedule}" + ("" if result.streaming else "/batchwise")
        flat[f"{prefix}/step_over_bound"] = result.step_over_bound
        flat[f"{prefix}/speedup_over_sync"] = result.speedup_over_sync
    return flat


HEADER = f"{'shape':<17}{'schedule':<14}{'teacher gets':<14}{'step s':>8}{'bound s':>9}{'over':>7}{'speedup':>9}" + (
    f"{'stale':>7}   idle: actor rollout teacher"
)


def row(result: Result) -> str:
    return (
        f"{result.shape:<17}{result.schedule:<14}{'responses' if result.streaming else 'batches':<14}"
        f"{result.step_s:8.3f}{result.bound_s:9.3f}{result.step_over_bound:7.3f}{result.speedup_over_sync:8.2f}x"
        f"{result.staleness:7.1f}{result.idle_actor:14.0%}{result.idle_rollout:8.0%}{result.idle_teacher:8.0%}"
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--clock", choices=["real", "virtual"], default="real", help="virtual: exact, takes seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--schedule", nargs="+", choices=MAX_STALENESS, default=list(MAX_STALENESS))
    parser.add_argument("--steps", type=int, default=12, help="measured, in steady state (12)")
    parser.add_argument("--unit", type=float, default=1.0, help="seconds of a balanced stage (1)")
    parser.add_argument("--sync", type=float, default=0.03, help="of a weight sync, in units (0.03)")
    parser.add_argument("--replicas", type=int, default=2, help="rollout workers (2)")
    parser.add_argument("--slots", type=int, default=16, help=f"of each, for batches of {BATCH_SIZE} answers (16)")
    parser.add_argument("--teachers", type=int, default=2, help="teacher workers (2)")
    parser.add_argument("--inflight", action="store_true", help="update weights in flight")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="metrics.jsonl of a run; config.yaml is beside it, or:"
    )
    parser.add_argument("--actor", type=int, help="devices of the actor pool of that run")
    parser.add_argument("--rollout", type=int, help="of its rollout pool")
    parser.add_argument("--teacher", type=int, help="its teacher workers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    asked = arguments(argv)
    if asked.replay is not None:
        try:
            print(replay(asked.replay, actor=asked.actor, rollout=asked.rollout, teacher=asked.teacher))
        except GkdError as error:
            sys.exit(f"error: {error}")
        return
    bench = Bench(
        unit_s=asked.unit,
        sync=asked.sync,
        n_steps=asked.steps,
        inflight=asked.inflight,
        pools=Pools(n_replicas=asked.replicas, n_slots=asked.slots, n_teachers=asked.teachers),
    )
    times = {shape: bench.times(SHAPES[shape]) for shape in asked.shape}
    work = watched(measure_all(bench, times, asked.schedule))
    found, late_s = virtual_time.run(work) if asked.clock == "virtual" else asyncio.run(work)
    print("\n".join([HEADER, *map(row, found)]))
    if asked.clock == "real":
        print(f"timers came {late_s * 1e3:.1f} ms late on average, by this machine, not by the schedule")
    if asked.json is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        report = summary(found) | {
            "setup": asdict(bench) | {"clock": asked.clock, "timers_late_s": late_s} | machine,
            "rows": [asdict(result) for result in found],
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
