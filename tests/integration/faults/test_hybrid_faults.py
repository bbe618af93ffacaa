"""Deaths of workers in each phase of the hybrid engine."""

from __future__ import annotations

import asyncio
import re
import signal

import pytest

from recipe_gkd.errors import GkdError
from tests._support.errors import culprits
from tests._support.processes import is_running
from tests.integration.faults.faulty import Census, TrainerFactory, inject

HYBRID = (
    "actor_rollout_ref.hybrid_engine=true",
    "trainer.scheduler=sync",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.megatron.param_offload=true",
    "actor_rollout_ref.actor.megatron.grad_offload=true",
    "actor_rollout_ref.actor.megatron.optimizer_offload=true",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "point"),
    [
        pytest.param("rollout", "sleep", id="engine killed in sleep"),
        pytest.param("rollout", "wake", id="engine killed in wake"),
        pytest.param("rollout", "ipc", id="engine killed in sync"),
        pytest.param("rollout", "log_probs", id="engine killed in verification"),
        pytest.param("rollout", "generate", id="engine killed in generation"),
        pytest.param("actor", "update", id="actor killed in update"),
        pytest.param("actor", "ipc", id="actor killed in sync"),
    ],
)
def test_fit_names_the_worker_that_was_killed_in_a_phase(start_trainer: TrainerFactory, pool: str, point: str) -> None:
    """The fixture checks that no process is left."""
    injected: list[int] = []

    async def train() -> None:
        async with start_trainer(*HYBRID, "trainer.max_worker_restarts=0") as trainer:
            group = trainer.cluster.actors if pool == "actor" else trainer.cluster.rollouts
            injected.append(await inject(group, 0, point, signal.SIGKILL))
            await trainer.fit()

    with pytest.raises(GkdError) as caught:
        asyncio.run(train())
    assert f"{pool} worker 0 of 1" in culprits(caught.value)
    assert not is_running(injected[0])
    assert caught.value.diagnosis is not None
    report = (caught.value.diagnosis / "report.md").read_text()
    assert re.search(rf"^\| {pool} worker 0 of 1 \|.* gone", report, re.MULTILINE), report


@pytest.mark.slow
def test_killed_engines_are_replaced_and_no_prompt_is_lost(start_trainer: TrainerFactory, census: Census) -> None:
    killed: list[int] = []

    async def train() -> list[float]:
        async with start_trainer(*HYBRID, "trainer.max_worker_restarts=3", "trainer.total_epochs=1") as trainer:
            losses: list[float] = []
            points = iter(("sleep", "wake", "log_probs"))
            update = trainer.cluster.update

            async def update_and_inject(batch):  # type: ignore[no-untyped-def]
                losses.append((metrics := await update(batch))["actor/loss"])
                if point := next(points, None):
                    await census.take(trainer.cluster)
                    killed.append(await inject(trainer.cluster.rollouts, 0, point, signal.SIGKILL, call=1))
                return metrics

            trainer.cluster.update = update_and_inject  # type: ignore[method-assign]
            await trainer.fit()
            return losses

    losses = asyncio.run(train())
    assert len(losses) == 10 and len(killed) == 3
    assert not any(is_running(pid) for pid in killed)
