"""Rollout workers that are killed or stopped at every moment of their work."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from faulty import DEADLINE_S, TrainerOf, lives

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError, WorkerDied
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.schedule import now
from recipe_gkd.trainer import MARGIN_S

pytestmark = pytest.mark.timeout(200)


def test_a_worker_killed_at_any_moment_is_replaced_and_no_prompt_is_lost_or_repeated(trainer_of: TrainerOf) -> None:
    strikes = {1: (0, "generate"), 3: (1, "receive"), 5: (0, "load")}
    trained: list[int] = []
    staleness: list[int] = []
    pids: list[int] = []

    async def train() -> None:
        async with trainer_of("trainer.max_worker_restarts=3") as trainer:
            group = trainer.workers.rollouts
            async with trainer.pipeline(Timeline(now)) as pipeline:
                async for batch in pipeline:
                    if strike := strikes.get(batch.step):
                        rank, moment = strike
                        pids.append(
                            await group.call_one(rank, "strike", moment, signal.SIGKILL, timeout_s=20, phase="arm")
                        )
                    async with pipeline.updating(batch):
                        await trainer.update(batch)
                    trained.extend(sample.prompt.uid for sample in batch.samples)
                    staleness.extend(batch.staleness)

    asyncio.run(train())
    assert trained == list(range(32))
    assert min(staleness) >= 0 and max(staleness) <= 1
    assert not any(map(lives, pids))


def test_a_worker_that_may_not_be_replaced_ends_the_run_at_once_with_a_diagnosis(
    trainer_of: TrainerOf, tmp_path: Path
) -> None:
    async def train() -> float:
        async with trainer_of("trainer.max_worker_restarts=0") as trainer:
            await trainer.workers.rollouts.call_one(1, "strike", "generate", signal.SIGKILL, timeout_s=20, phase="arm")
            await trainer.fit()
        raise AssertionError("it ended well")

    with pytest.raises(WorkerDied, match=r"rollout worker 1 of 2 died[\s\S]*max_worker_restarts=0") as caught:
        asyncio.run(train())
    folder = Path(re.search(r"diagnosis: (\S+)", str(caught.value))[1])  # type: ignore[index]
    assert "rollout worker 1" in (folder / "report.md").read_text()


def test_a_stopped_worker_is_named_within_its_deadline_whatever_it_was_doing(
    trainer_of: TrainerOf, tmp_path: Path
) -> None:
    """One pool for all moments: a stopped process goes on with SIGCONT, and the next sync repairs it."""

    async def suffer() -> None:
        async with trainer_of() as trainer:
            group, weights = trainer.workers.rollouts, trainer.workers.weights
            await weights.sync(0)
            batches = list(trainer.loader.batches(0, 0))

            async def generate() -> None:
                async for _ in trainer.generate(1, batches[0].prompts, 0):
                    pass

            work = {"receive": lambda: weights.sync(1), "load": lambda: weights.sync(2), "generate": generate}
            for moment, act in work.items():
                pid = await group.call_one(1, "strike", moment, signal.SIGSTOP, timeout_s=20, phase="arm")
                began = time.monotonic()
                with pytest.raises(GkdError, match="rollout worker 1") as caught:
                    await act()
                seconds = time.monotonic() - began
                assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
                margin_s = MARGIN_S if moment == "generate" else 0  # the driver's, beyond the worker's own deadline
                assert seconds < DEADLINE_S + margin_s + 5, (moment, seconds)
                assert isinstance(caught.value, DeadlineError | WeightSyncError)
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.5)
                await weights.sync(3)

    asyncio.run(suffer())
