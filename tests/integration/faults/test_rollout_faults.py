from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from recipe_gkd.errors import GkdError
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.clock import now
from recipe_gkd.trainer import Trainer
from tests._support.processes import is_running
from tests.integration.faults.faulty import DEADLINE_S, Census, TrainerFactory, inject

pytestmark = pytest.mark.timeout(250)

ERROR_MARGIN_S = 5.0
"""Time from the deadline to the error: the margins of nested deadlines, on a busy machine."""


async def stop_and_continue(trainer: Trainer, point: str) -> None:
    """Stop worker 1 at a point of its code, wait for the error that names it, continue it, and sync its weights."""
    weights = trainer.workers.weights
    prompts = next(iter(trainer.loader.batches(0, 0))).prompts
    call = 1 if point == "load" else 2
    injected = await inject(trainer.workers.rollouts, 1, point, signal.SIGSTOP, call=call)
    with pytest.raises(GkdError, match="rollout worker 1"):
        if point != "generate":
            await weights.sync(0)
        else:
            async for _ in trainer.generate(1, prompts, 0):
                pass
    assert injected.seconds_ago < DEADLINE_S + ERROR_MARGIN_S
    assert psutil.Process(injected.pid).status() == psutil.STATUS_STOPPED
    os.kill(injected.pid, signal.SIGCONT)
    await weights.sync(0)


def test_stopped_workers_are_named_and_killed_workers_replaced_without_losing_prompts(
    start_trainer: TrainerFactory, census: Census
) -> None:
    """One pool serves all faults, because its start takes longer than any of them."""
    kills = {1: (0, "generate"), 3: (1, "receive"), 5: (0, "load")}  # step -> rank, point
    trained: list[int] = []
    staleness: list[int] = []
    killed: list[int] = []

    async def train() -> None:
        async with start_trainer("trainer.max_worker_restarts=2") as trainer:
            await trainer.workers.weights.sync(0)
            for point in ("receive", "load", "generate"):
                await stop_and_continue(trainer, point)
            async with trainer.pipeline(Timeline(now)) as pipeline:
                async for batch in pipeline:
                    if batch.step in kills:
                        await census.take(trainer.workers)  # Include workers that are replaced later.
                        rank, point = kills[batch.step]
                        injected = await inject(trainer.workers.rollouts, rank, point, signal.SIGKILL)
                        killed.append(injected.pid)
                    async with pipeline.actor_update(batch):
                        await trainer.update(batch)
                    trained.extend(sample.prompt.uid for sample in batch.samples)
                    staleness.extend(batch.staleness)

    with pytest.raises(GkdError, match=r"rollout worker 0 of 2 died[\s\S]*max_worker_restarts=2 are used up") as caught:
        asyncio.run(train())
    assert trained == list(range(len(trained))) and len(trained) >= 20
    assert min(staleness) >= 0 and max(staleness) <= 1
    assert len(killed) == 3 and not any(map(is_running, killed))
    folder = Path(re.search(r"diagnosis: (\S+)", str(caught.value))[1])  # type: ignore[index]
    assert "rollout worker 0" in (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)  # An engine of two tensor-parallel ranks starts three times.
def test_worker_with_a_killed_tensor_rank_is_replaced_without_losing_prompts(
    start_trainer: TrainerFactory, census: Census
) -> None:
    """Ranks are killed during generation and while the engine waits for weights. The worker's own process survives."""
    trained: list[int] = []
    workers_with_killed_rank: list[int] = []

    async def kill_tensor_rank(trainer: Trainer, tensor_rank: int) -> None:
        await census.take(trainer.workers)
        [location] = await locate(trainer.workers.rollouts.handles)
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
                    await trainer.update(batch)
                trained.extend(sample.prompt.uid for sample in batch.samples)

    asyncio.run(train())
    assert trained == list(range(40)) and len(workers_with_killed_rank) == 2
    assert not any(map(is_running, workers_with_killed_rank))
