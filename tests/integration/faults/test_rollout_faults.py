from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from recipe_gkd.errors import GkdError, WorkerDied
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.clock import now
from recipe_gkd.trainer import Trainer
from tests._support.errors import culprits
from tests._support.processes import is_running
from tests.integration.faults.faulty import Census, TrainerFactory, inject

STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.mark.slow  # test_kills.py replaces a killed worker, and test_actor_faults.py has a silent one
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({1: (0, "generate", STOP), 3: (1, "receive", KILL), 5: (0, "load", STOP)}, id="stop, kill, stop"),
        pytest.param({1: (1, "receive", STOP), 3: (0, "load", STOP), 5: (1, "generate", KILL)}, id="stop, stop, kill"),
        pytest.param({1: (0, "generate", KILL), 3: (1, "load", KILL), 5: (0, "receive", STOP)}, id="kill, kill, stop"),
    ],
)
def test_stopped_and_killed_workers_are_replaced_without_losing_prompts(
    start_trainer: TrainerFactory, census: Census, faults: dict[int, tuple[int, str, signal.Signals]]
) -> None:
    """The first two faults, by step, use up the restarts. The third ends the run with an error that names the worker.

    One pool serves all faults, because its start takes longer than any of them.
    """
    trained: list[int] = []
    staleness: list[int] = []
    signaled: list[int] = []

    async def train() -> None:
        async with (
            start_trainer("trainer.max_worker_restarts=2") as trainer,
            trainer.pipeline(Timeline(now)) as pipeline,
        ):
            async for batch in pipeline:
                if batch.step in faults:
                    await census.take(trainer.cluster)  # Include workers that are replaced later.
                    rank, point, number = faults[batch.step]
                    signaled.append(await inject(trainer.cluster.rollouts, rank, point, number))
                async with pipeline.actor_update(batch):
                    await trainer.cluster.update(batch)
                trained.extend(sample.prompt.uid for sample in batch.samples)
                staleness.extend(batch.staleness)

    rank, _, number = faults[5]
    with pytest.raises(WorkerDied if number is KILL else GkdError) as caught:
        asyncio.run(train())
    assert f"rollout worker {rank} of 2" in culprits(caught.value)
    assert trained == list(range(len(trained))) and len(trained) >= 20
    assert min(staleness) >= 0 and max(staleness) <= 1
    assert len(signaled) == 3 and not any(is_running(pid) for pid in signaled)
    folder = caught.value.diagnosis
    assert folder is not None and f"rollout worker {rank}" in (folder / "report.md").read_text()
    assert len(list(folder.parent.iterdir())) == 1 + sum(fault[2] is STOP for fault in list(faults.values())[:2])


@pytest.mark.slow
def test_worker_with_a_killed_tensor_rank_is_replaced_without_losing_prompts(
    start_trainer: TrainerFactory, census: Census
) -> None:
    """Ranks are killed during generation and while the engine waits for weights. The worker's own process survives."""
    trained: list[int] = []
    workers_with_killed_rank: list[int] = []

    async def kill_tensor_rank(trainer: Trainer, tensor_rank: int) -> None:
        await census.take(trainer.cluster)
        [location] = await locate(trainer.cluster.rollouts.handles)
        [pid] = [
            process.pid
            for process in process_trees.tree([location.pid])
            if f"Worker_TP{tensor_rank}" in psutil.Process(process.pid).name()
        ]
        os.kill(pid, signal.SIGKILL)
        workers_with_killed_rank.append(location.pid)

    async def train() -> None:
        layout = "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
        async with (
            start_trainer(*layout, "trainer.max_worker_restarts=2", "trainer.scheduler=one_step_off") as trainer,
            trainer.pipeline(Timeline(now)) as pipeline,
        ):
            async for batch in pipeline:
                if batch.step in (2, 5):
                    await kill_tensor_rank(trainer, batch.step % 2)
                async with pipeline.actor_update(batch):
                    await trainer.cluster.update(batch)
                trained.extend(sample.prompt.uid for sample in batch.samples)

    asyncio.run(train())
    assert trained == list(range(40)) and len(workers_with_killed_rank) == 2
    assert not any(map(is_running, workers_with_killed_rank))
