"""Cost of the driver and of the way of the teacher's rows, over the numbers of replicas, actor ranks and top-k.

    python benchmarks/scale.py [--json FILE] [--steps 12] [--quick]

The training loop, Ray, the scoring workers, and the teacher's proxy and protocol are real. Engines, actor ranks and the
teacher's model are simulated: they take time and produce arrays of the right size. Up to ``PROCESSES`` processes stand
in for all replicas, and as many for all ranks, so that a small machine can run 64 of them; the driver makes the same
calls as for separate ones. All cases run on one machine, where the processes compete for its cores.

    us/token      CPU time of the driver's process, all threads, per response token
    MB per GB     growth of the driver's own memory (RssAnon) per GB of rows per step; rows in flight are several times
                  that with one_step_off
    M rows x k/s  teacher log-probabilities that arrived at the actor ranks, in millions per second
    step/bound    duration of a step, divided by the duration of its slowest stage
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from own_memory import PeakMemory, own_memory
from scale_model import ASSUMPTIONS, DriverCosts, Observation, extrapolate
from scale_stages import (
    PROMPT_TOKENS,
    VOCABULARY,
    Load,
    SimulatedActors,
    SimulatedRollouts,
    SimulatedSync,
    running_teacher,
)

from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config, load_config
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptLoader
from recipe_gkd.data.samples import Prompt
from recipe_gkd.data.sharding import Sharding, token_cost
from recipe_gkd.ray_cluster.connection import start_local_cluster
from recipe_gkd.ray_cluster.node_probe import own_node
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.teachers.router import open_teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from recipe_gkd.trainer import Trainer
from teacher.records import TeacherSequence

PROCESSES = 4
WARM_UP_STEPS = 3
TARGETS = {"driver_us_per_response_token": 1.0, "driver_mb_per_gb_of_rows": 20.0}
LOAD = Load(responses=64, mean_tokens=1024, k=256, generate_s=1.0, teacher_s=0.3, update_s=1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured configuration.

    Attributes:
        load: Work of one step.
        direct: True if the driver itself receives the rows, for comparison.
    """

    load: Load = LOAD
    replicas: int = 4
    ranks: int = 4
    direct: bool = False

    @property
    def name(self) -> str:
        """Name in the table."""
        name = f"{self.replicas} + {self.ranks}, {self.load.responses} x {self.load.mean_tokens}, k={self.load.k}"
        return f"{name}, rows through the driver" if self.direct else name


CASES = [
    Case(),
    Case(load=replace(LOAD, k=32)),
    Case(load=replace(LOAD, k=128)),
    Case(replicas=1, ranks=1),
    Case(replicas=16, ranks=8),
    Case(replicas=64, ranks=16),
    Case(load=replace(LOAD, responses=256, mean_tokens=256)),
    Case(load=replace(LOAD, responses=16, mean_tokens=4096)),
    Case(direct=True),
    Case(load=replace(LOAD, k=32), direct=True),
]
QUICK = [
    Case(load=Load(responses=8, mean_tokens=64, k=k, generate_s=0.1, teacher_s=0.05, update_s=0.1), replicas=2, ranks=2)
    for k in (8, 64)
]


class SimulatedData:
    """Prompts of random ids, in place of a data set."""

    def __init__(self, n: int) -> None:
        rng = np.random.default_rng(0)
        self.ids = [rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32) for _ in range(n)]

    def __len__(self) -> int:
        return len(self.ids)

    def prompt(self, index: int, uid: int, *, with_reference: bool = False) -> Prompt:
        """Return a prompt."""
        return Prompt(uid=uid, ids=self.ids[index], row=index)


class MeasuredTrainer(Trainer):
    """The trainer, which records time, CPU time and rows of each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[tuple[float, float, float, float]] = []
        self.cluster.update = self.measured_update  # type: ignore[method-assign]

    async def measured_update(self, batch: ReadyBatch) -> dict[str, float]:
        """Do the update, and record its end."""
        metrics = await Cluster.update(self.cluster, batch)
        tokens = sum(len(sample.response.ids) for sample in batch.samples)
        rows = sum(sample.teacher.n_bytes for sample in batch.samples)
        self.steps.append((time.perf_counter(), time.process_time(), float(tokens), float(rows)))
        return metrics


def configured(case: Case, port: int, folder: Path, steps: int) -> Config:
    """Return the configuration of a run."""
    rollout, teacher = "actor_rollout_ref.rollout", "actor_rollout_ref.teacher"
    load = case.load
    return load_config(
        "on_policy_distill_trainer",
        [
            "data.train_files=unused", "actor_rollout_ref.model.path=unused", f"data.train_batch_size={load.responses}",
            f"data.max_prompt_length={PROMPT_TOKENS}", f"data.max_response_length={load.max_tokens}",
            f"{teacher}.server_port={port}", f"{teacher}.n_server_workers=1", f"{teacher}.wire_dtype=float16",
            f"rollout.n_gpus_per_node={case.replicas}", f"trainer.n_gpus_per_node={case.ranks}", "trainer.device=cpu",
            f"{rollout}.max_num_seqs={max(1, load.responses // case.replicas)}", "trainer.scheduler=one_step_off",
            f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}", "trainer.save_freq=-1",
            # Simulated engines cannot be compared with an actor.
            "trainer.test_freq=-1", "trainer.logger=[jsonl]", f"{rollout}.mismatch_bound=null",
        ],
    )  # fmt: skip


def simulated_group(name: str, worker: type, n: int, load: Load) -> WorkerGroup:
    """Return a group of ``n`` workers, which share a few processes."""
    remote: Any = ray.remote(worker)
    options = dict(num_cpus=0) if name == "rollout" else dict(num_cpus=0, max_concurrency=n)
    handles = [remote.options(**options).remote(load) for _ in range(min(n, PROCESSES))]
    return WorkerGroup(name, [handles[rank % len(handles)] for rank in range(n)])


@contextmanager
def running_cluster(case: Case, config: Config, teachers: Any) -> Iterator[Cluster]:
    """Start simulated workers and real scoring workers, and kill them at the end."""
    rollouts = simulated_group("rollout", SimulatedRollouts, case.replicas, case.load)
    actors = simulated_group("actor", SimulatedActors, case.ranks, case.load)
    homes = Homes((own_node(),), (0,) * case.ranks)
    scoring = None
    if not case.direct:
        scoring = ScoringPool.start(teachers.client_specs(), {own_node(): "here"}, per_node=1, max_restarts=0)
        scoring.homes = homes
        teachers.requests = scoring
    weights: Any = SimulatedSync()
    restarts: Any = SimpleNamespace(n_restarts=0)
    sharding = Sharding(homes.of_ranks, token_cost)
    try:
        yield Cluster(
            config, actors, rollouts, weights, list(range(case.ranks)), sharding, restarts, restarts, scoring=scoring
        )
    finally:
        handles = [*actors.handles, *rollouts.handles, *([] if scoring is None else scoring.group.handles)]
        for handle in dict.fromkeys(handles):
            ray.kill(handle)


def measure(case: Case, n_steps: int) -> dict[str, float]:
    """Run a training and return its figures."""
    steps = WARM_UP_STEPS + n_steps
    with tempfile.TemporaryDirectory() as folder, running_teacher(case.load) as port:
        config = configured(case, port, Path(folder), steps)
        with open_teachers(config, Routes(("default",))) as teachers:
            for client in teachers.clients.values():
                client.hello(30)
            with running_cluster(case, config, teachers) as cluster:
                data: Any = SimulatedData(case.load.responses * 2)
                loader = PromptLoader(data, config.data, n=1, epochs=1, max_steps=steps)
                start = ResumeState(Progress(0, 0, len(data), config.data.seed, config.data.shuffle))
                trainer = MeasuredTrainer(config, cluster, teachers, loader, start)
                before = own_memory()
                with PeakMemory() as memory:
                    asyncio.run(trainer.loop(StopRequest()))
    return figures(case, trainer.steps, max(0, memory.peak - before))


def figures(case: Case, steps: list[tuple[float, float, float, float]], growth: int) -> dict[str, float]:
    """Return the figures of a case from the records of its steps, without the first ones.

    Args:
        steps: End, CPU time of the driver, response tokens and bytes of rows of each step.
        growth: Growth of the driver's memory in bytes.
    """
    measured = np.diff(np.array(steps)[:, :2], axis=0)[WARM_UP_STEPS - 1 :]
    amounts = np.array(steps)[WARM_UP_STEPS:, 2:]
    (wall_s, cpu_s), (tokens, row_bytes) = measured.sum(0), amounts.sum(0)
    load = case.load
    return {
        "us_per_token": 1e6 * cpu_s / tokens,
        "mb_per_gb": growth / 1e6 / (amounts[:, 1].mean() / 1e9),
        "million_rows_k_per_s": tokens * load.k / wall_s / 1e6,
        "step_over_bound": float(
            statistics.median(measured[:, 0]) / max(load.generate_s, load.teacher_s, load.update_s)
        ),
        "driver_s_per_step": cpu_s / len(measured),
        "tokens_per_step": tokens / len(measured),
        "gb_per_s": row_bytes / wall_s / 1e9,
    }


def worker_rate(n_bytes: int = 1 << 30) -> float:
    """Return the rate in GB/s at which one scoring worker receives rows and stores them, with nothing else to do."""
    load = Load(responses=1, mean_tokens=512, k=256, generate_s=0, teacher_s=0, update_s=0)
    case = Case(load=load, replicas=1, ranks=1)
    with tempfile.TemporaryDirectory() as folder, running_teacher(load) as port:
        config = configured(case, port, Path(folder), 1)
        with open_teachers(config, Routes(("default",))) as teachers:
            for client in teachers.clients.values():
                client.hello(30)
            with running_cluster(case, config, teachers) as cluster:
                return asyncio.run(_receive(cluster.scoring, load, n_bytes))


async def _receive(pool: Any, load: Load, n_bytes: int) -> float:
    sequences = [TeacherSequence(np.zeros(load.max_tokens + 1, np.int32), 1)] * 8
    request = TeacherRequest(teacher="default", step=0, uids=range(len(sequences)), sequences=sequences)
    await pool.scores(request, 60)
    began, received = time.perf_counter(), 0
    while received < n_bytes:
        received += sum(scores.n_bytes for scores in await pool.scores(request, 60))
    return received / (time.perf_counter() - began) / 1e9


def report(results: dict[str, dict[str, float]], model: list[dict[str, float]]) -> None:
    """Print the tables."""
    width = max(map(len, results))
    print(f"{'replicas + ranks, responses':{width}}  us/token  MB per GB  M rows x k/s  step/bound")
    for name, row in results.items():
        print(
            f"{name:{width}}  {row['us_per_token']:8.2f}  {row['mb_per_gb']:9.1f}  {row['million_rows_k_per_s']:12.1f}"
            f"  {row['step_over_bound']:10.2f}"
        )
    if model:
        print(f"\nmodel of larger clusters:\n{ASSUMPTIONS}")
        print("GPUs           rows GB  driver s  scoring worker s  network s  step / compute")
        for row in model:
            n = int(row["gpus"])
            print(
                f"{n:5d} + {n:<5d}  {row['rows_gb']:7.1f}  {row['driver_s']:8.1f}  {row['scoring_worker_s']:16.1f}  "
                f"{row['network_s']:9.1f}  {row['step_over_compute']:14.2f}"
            )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each case")
    parser.add_argument("--quick", action="store_true", help="two small cases and no model: does it run?")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    start_local_cluster(num_cpus=4, include_dashboard=False, log_to_driver=False)
    cases = QUICK if arguments.quick else CASES
    measure(cases[0], 2)  # imports and caches of the driver would count as growth of the first case
    results, observations = {}, []
    for case in cases:
        results[case.name] = row = measure(case, arguments.steps)
        print(f"{case.name}: {row['us_per_token']:.2f} us per token", file=sys.stderr)
        if not case.direct:
            observations.append(
                Observation(
                    row["driver_s_per_step"], case.load.responses, row["tokens_per_step"], case.replicas, case.ranks
                )
            )
    model, costs = [], None
    if not arguments.quick:
        costs, rate = DriverCosts.fit(observations), worker_rate()
        model = [extrapolate(costs, rate, n) for n in (8, 64, 256, 1024)]
    report(results, model)
    ray.shutdown()
    if arguments.json:
        main_row = results[next(iter(results))]
        found = {
            "machine": platform.machine(),
            "cpu_count": len(os.sched_getaffinity(0)),
            "driver_us_per_response_token": main_row["us_per_token"],
            "driver_mb_per_gb_of_rows": main_row["mb_per_gb"],
            "targets": TARGETS,
            "cases": results,
            "costs": costs and asdict(costs),
            "model": model,
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
