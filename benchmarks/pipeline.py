"""Step time relative to its lower bound: the real schedule with stages that only take time.

    python benchmarks/pipeline.py [--clock virtual] [--json FILE] [--shape S ...] [--schedule S ...]
    python benchmarks/pipeline.py --replay RUN/metrics.jsonl      step times of that run with other pools and schedules
    python benchmarks/pipeline.py --turns 3                       conversations whose tools take 0 to 2 s

A load shape consists of the durations of generation, scoring and update of a batch. For each shape and schedule, the
benchmark prints the steady-state step time divided by ``step_bound`` of ``recipe_gkd.metrics.advice.step_time_model``
for the same stages, which are measured without overlap. It also prints the speedup over ``sync`` without streaming,
where the teacher receives whole batches. Every schedule runs twice: with responses streamed to the teacher as they
finish, as in training (the main figures), and batch by batch, which the bound describes.

A sync (``--sync``: 3 % of a balanced stage) blocks the actor and the rollout workers, and the bound does not include
it. If one of these two is the slowest stage, ``step_over_bound`` is at least 1 plus the sync's share.
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
from pipeline_turns import tables

from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.errors import GkdError
from recipe_gkd.metrics.advice.step_time_model import step_bound
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.runtime.clock import now


@dataclass(frozen=True)
class Shape:
    """Load shape: durations of the stages in units.

    Attributes:
        generate: Duration of the generation of a batch.
        teacher: Duration of the scoring of a batch.
        update: Duration of an update.
        responses: Distribution of the durations of responses: ``equal``, ``varied`` (uniform, 20 % around the mean) or
            ``long_tailed`` (lognormal).
    """

    generate: float
    teacher: float
    update: float
    responses: str = "varied"


SHAPES = {
    "balanced": Shape(1, 1, 1),
    "generation_bound": Shape(2, 0.7, 0.7),
    "teacher_bound": Shape(0.7, 2, 0.7),
    "update_bound": Shape(0.7, 0.7, 2),
    "long_tailed": Shape(1, 1, 1, "long_tailed"),
    "balanced_equal": Shape(1, 1, 1, "equal"),
}
N_STREAMED_REQUESTS = 16
"""Number of teacher requests per batch with streaming."""
BATCH_SIZE = 64
SEED = 0
TICK_S = 0.05
N_BOUND_BATCHES = 3
"""Number of batches that the bound is measured on."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of one shape and schedule in the steady state.

    Attributes:
        shape: Name of the load shape.
        streaming: True if responses were streamed to the teacher.
        step_s: Step time.
        bound_s: Lower bound on the step time.
        step_over_bound: Step time divided by its bound.
        staleness: Mean staleness.
        idle_actor: Idle fraction of the actor.
        idle_rollout: Idle fraction of the rollout replicas.
        idle_teacher: Idle fraction of the teacher workers.
        speedup_over_sync: Speedup over the schedule ``sync`` batch by batch.
    """

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


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of the measurement.

    Attributes:
        unit_s: Duration of one unit, in seconds.
        sync: Duration of a weight sync, in units.
        n_steps: Number of measured steps, in the steady state.
        inflight: True to update weights in flight.
        pools: Sizes of the pools.
    """

    unit_s: float
    sync: float
    n_steps: int
    inflight: bool
    pools: Pools

    def times(self, shape: Shape) -> BatchTimes:
        """Return the durations of a shape. Responses are scaled so that one batch takes the shape's generation time."""
        shares = response_shares(shape.responses)
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
            requests_per_batch=N_STREAMED_REQUESTS if streaming else 1,
            inflight_update=self.inflight and staleness > 0,
        )
        g, t, u, w = await _alone(times, self.pools, pipeline_config.requests_per_batch, whole_batches=not streaming)
        bound = step_bound(g, t, u, w, staleness)
        stages = Stages(lambda step: times, self.pools, whole_batches=not streaming)
        warm_up = 2 * staleness + 2
        record = await drive(stages, pipeline_config, warm_up + self.n_steps + staleness)
        since, until = record.ended_at[warm_up - 1], record.ended_at[warm_up + self.n_steps - 1]
        step_s = (until - since) / self.n_steps

        idle_shares = idle(stages.timeline, stages, since, until)
        return Result(
            shape=shape,
            schedule=schedule,
            streaming=streaming,
            step_s=step_s,
            bound_s=bound,
            step_over_bound=step_s / bound,
            staleness=statistics.mean(record.staleness[warm_up:]),
            idle_actor=idle_shares["perf/idle_actor"],
            idle_rollout=idle_shares["perf/idle_rollout"],
            idle_teacher=idle_shares["perf/idle_teacher"],
        )


async def _alone(times: BatchTimes, pools: Pools, n_requests: int, whole_batches: bool) -> list[float]:
    """Return the mean durations of generate, teacher, update and sync. Timers of a real clock are late by a few ms."""
    stages = [Stages(lambda step: times, pools, whole_batches=whole_batches) for _ in range(N_BOUND_BATCHES)]
    return [statistics.fmean(stage) for stage in zip(*[await each.alone(n_requests) for each in stages], strict=True)]


def response_shares(kind: str) -> list[float]:
    """Return the relative durations of the responses of a batch."""
    rng = random.Random(SEED)
    draw = {
        "equal": lambda: 1.0,
        "varied": lambda: rng.uniform(0.8, 1.2),
        "long_tailed": lambda: min(8.0, rng.lognormvariate(0, 1)),
    }[kind]
    return [draw() for _ in range(BATCH_SIZE)]


async def measure_all(bench: Bench, times: dict[str, BatchTimes], schedules: list[str]) -> list[Result]:
    """Measure all shapes and schedules concurrently.

    Concurrent runs only wait for timers. Together they allow steps so long that late timers hardly matter.

    Args:
        bench: Settings of the measurement.
        times: Durations of the stages for each shape.
    """
    cases = [(shape, schedule, streamed) for shape in times for schedule in schedules for streamed in (True, False)]
    baselines = [(shape, "sync", False) for shape in times]
    everything = list(dict.fromkeys(cases + baselines))
    measured = await asyncio.gather(*(bench.measure(*case, times[case[0]]) for case in everything))
    found = dict(zip(everything, measured, strict=True))
    return [
        replace(found[case], speedup_over_sync=found[case[0], "sync", False].step_s / found[case].step_s)
        for case in cases
    ]


async def with_timer_delay(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Return the result of ``work``, and the mean delay of a timer meanwhile, in seconds: the load of the machine."""
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
    """Return ``<shape>/<schedule>/<figure>`` with streaming and ``<shape>/<schedule>/batchwise/<figure>`` without."""
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
    parser.add_argument(
        "--clock", choices=["real", "virtual"], default="real", help="virtual is exact and takes seconds (real)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--schedule", nargs="+", choices=MAX_STALENESS, default=list(MAX_STALENESS))
    parser.add_argument("--steps", type=int, default=12, help="number of measured steps (12)")
    parser.add_argument("--unit", type=float, default=1.0, help="duration of a balanced stage in seconds (1)")
    parser.add_argument("--sync", type=float, default=0.03, help="duration of a weight sync in units (0.03)")
    parser.add_argument("--replicas", type=int, default=2, help="number of rollout replicas (2)")
    parser.add_argument(
        "--slots", type=int, default=16, help=f"slots per replica, for batches of {BATCH_SIZE} responses (16)"
    )
    parser.add_argument("--teachers", type=int, default=2, help="number of teacher workers (2)")
    parser.add_argument("--inflight", action="store_true", help="update weights in flight")
    parser.add_argument("--turns", type=int, help="throughput of conversations of this many turns, in virtual time")
    parser.add_argument("--tool-s", type=float, default=2.0, help="longest tool call of --turns, in seconds (2)")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="metrics.jsonl of a run. Its pools are read from config.yaml in the same folder, or from these options:",
    )
    parser.add_argument("--actor", type=int, help="number of devices of the actor pool")
    parser.add_argument("--rollout", type=int, help="number of devices of the rollout pool")
    parser.add_argument("--teacher", type=int, help="number of teacher workers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.replay is not None:
        try:
            print(replay(options.replay, actor=options.actor, rollout=options.rollout, teacher=options.teacher))
        except GkdError as error:
            sys.exit(f"error: {error}")
        return
    if options.turns is not None:
        pools = Pools(n_replicas=options.replicas, n_slots=options.slots, n_teachers=options.teachers)
        print("\n".join(tables(options.turns, options.tool_s, pools)))
        return
    bench = Bench(
        unit_s=options.unit,
        sync=options.sync,
        n_steps=options.steps,
        inflight=options.inflight,
        pools=Pools(n_replicas=options.replicas, n_slots=options.slots, n_teachers=options.teachers),
    )
    times = {shape: bench.times(SHAPES[shape]) for shape in options.shape}
    work = with_timer_delay(measure_all(bench, times, options.schedule))
    found, late_s = virtual_time.run(work) if options.clock == "virtual" else asyncio.run(work)
    print("\n".join([HEADER, *map(row, found)]))
    if options.clock == "real":
        print(f"timers of this machine were {late_s * 1e3:.1f} ms late on average")
    if options.json is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        report = summary(found) | {
            "setup": asdict(bench) | {"clock": options.clock, "timers_late_s": late_s} | machine,
            "rows": [asdict(result) for result in found],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
