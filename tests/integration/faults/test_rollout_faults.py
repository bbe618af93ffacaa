"""Rollout workers that are stopped or killed at every moment of their work: named in time, or replaced."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from recipe_gkd.errors import GkdError, WorkerDied
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.clock import now
from recipe_gkd.trainer import Trainer
from tests.integration.faults.faulty import DEADLINE_S, Census, TrainerOf, arm, lives

pytestmark = pytest.mark.timeout(250)


async def stop_and_continue(trainer: Trainer, moment: str) -> None:
    """Stop worker 1 at a moment; the error names it in time; with SIGCONT and a full sync it is as good as before."""
    weights = trainer.workers.weights
    prompts = next(iter(trainer.loader.batches(0, 0))).prompts
    strike = await arm(trainer.workers.rollouts, 1, moment, signal.SIGSTOP, call=1 if moment == "load" else 2)
    with pytest.raises(GkdError, match="rollout worker 1"):
        if moment != "generate":
            await weights.sync(0)
        else:
            async for _ in trainer.generate(1, prompts, 0):
                pass
    print(f"stopped in {moment}: the error after {strike.seconds:.1f} s")
    assert strike.seconds < DEADLINE_S + 5
    assert psutil.Process(strike.pid).status() == psutil.STATUS_STOPPED
    os.kill(strike.pid, signal.SIGCONT)
    await weights.sync(0)


def test_workers_are_named_when_stopped_and_replaced_when_killed_and_no_prompt_is_lost_or_repeated(
    trainer_of: TrainerOf, census: Census
) -> None:
    """One pool for all moments, since it takes longer to start than any of them."""
    kills = {1: (0, "generate"), 3: (1, "receive"), 5: (0, "load"), 7: (1, "generate")}
    trained: list[int] = []
    staleness: list[int] = []
    pids: list[int] = []

    async def train() -> None:
        async with trainer_of("trainer.max_worker_restarts=3") as trainer:
            await trainer.workers.weights.sync(0)
            for moment in ("receive", "load", "generate"):
                await stop_and_continue(trainer, moment)
            async with trainer.pipeline(Timeline(now)) as pipeline:
                async for batch in pipeline:
                    if batch.step in kills:
                        await census.take(trainer.workers)  # of the workers between the first and the last, too
                        strike = await arm(trainer.workers.rollouts, *kills[batch.step], signal.SIGKILL)
                        pids.append(strike.pid)
                    async with pipeline.actor_update(batch):
                        await trainer.update(batch)
                    trained.extend(sample.prompt.uid for sample in batch.samples)
                    staleness.extend(batch.staleness)

    with pytest.raises(
        WorkerDied, match=r"rollout worker 1 of 2 died[\s\S]*max_worker_restarts=3 are used up"
    ) as caught:
        asyncio.run(train())
    assert trained == list(range(len(trained))) and len(trained) >= 28
    assert min(staleness) >= 0 and max(staleness) <= 1
    assert len(pids) == 4 and not any(map(lives, pids))
    folder = Path(re.search(r"diagnosis: (\S+)", str(caught.value))[1])  # type: ignore[index]
    assert "rollout worker 1" in (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)  # an engine of two tensor ranks starts three times
def test_a_worker_whose_tensor_rank_is_killed_is_replaced_and_no_prompt_is_lost_or_repeated(
    trainer_of: TrainerOf, census: Census
) -> None:
    """While it generates, and while it waits for weights: the worker's own process lives on in both cases."""
    trained: list[int] = []
    killed: list[int] = []

    async def kill_tensor_rank(trainer: Trainer, number: int) -> None:
        await census.take(trainer.workers)
        [place] = await locate(trainer.workers.rollouts.handles)
        [rank] = [
            one.pid for one in process_trees.tree([place.pid]) if f"Worker_TP{number}" in psutil.Process(one.pid).name()
        ]
        os.kill(rank, signal.SIGKILL)
        killed.append(place.pid)

    async def train() -> None:
        layout = "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
        async with (
            trainer_of(*layout, "trainer.max_worker_restarts=2", "trainer.scheduler=one_step_off") as trainer,
            trainer.pipeline(Timeline(now)) as pipeline,
        ):
            async for batch in pipeline:
                if batch.step in (2, 5):
                    await kill_tensor_rank(trainer, number=batch.step % 2)
                async with pipeline.actor_update(batch):
                    await trainer.update(batch)
                trained.extend(sample.prompt.uid for sample in batch.samples)

    asyncio.run(train())
    assert trained == list(range(40)) and len(killed) == 2
    assert not any(map(lives, killed))
