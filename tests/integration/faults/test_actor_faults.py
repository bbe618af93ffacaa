from __future__ import annotations

import asyncio
import re
import signal

import pytest

from recipe_gkd.errors import GkdError
from recipe_gkd.trainer import Trainer
from tests._support.errors import culprits
from tests.integration.faults.faulty import TrainerFactory, inject

TWO_RANKS = (
    "trainer.n_gpus_per_node=2",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
)


@pytest.mark.parametrize(
    ("point", "rank", "number"),
    [
        pytest.param("update", 1, signal.SIGSTOP, id="stopped in update", marks=pytest.mark.slow),
        pytest.param("gather", 1, signal.SIGSTOP, id="stopped in gather", marks=pytest.mark.slow),
        pytest.param("broadcast", 0, signal.SIGSTOP, id="stopped in broadcast", marks=pytest.mark.slow),
        pytest.param("update", 1, signal.SIGKILL, id="killed in update", marks=pytest.mark.slow),
        pytest.param("gather", 1, signal.SIGKILL, id="killed in gather", marks=pytest.mark.slow),
        pytest.param("broadcast", 0, signal.SIGKILL, id="killed in broadcast", marks=pytest.mark.slow),
    ],
)
def test_fit_with_a_failing_actor_rank_names_it_and_ends(
    start_trainer: TrainerFactory, point: str, rank: int, number: signal.Signals
) -> None:
    async def train() -> None:
        async with start_trainer(*TWO_RANKS) as trainer:
            await inject(trainer.cluster.actors, rank, point, number)
            await trainer.fit()

    with pytest.raises(GkdError) as caught:
        asyncio.run(train())
    assert f"actor worker {rank} of 2" in culprits(caught.value)
    assert caught.value.diagnosis is not None
    report = (caught.value.diagnosis / "report.md").read_text()
    state = "stopped" if number == signal.SIGSTOP else "gone"
    assert re.search(rf"^\| actor worker {rank} of 2 \|.* {state}", report, re.MULTILINE), report


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize(("point", "rank"), [("update", 1), ("gather", 1), ("broadcast", 0)])
def test_lost_rank_is_replaced_with_all_others_while_the_engine_stays(
    start_trainer: TrainerFactory, point: str, rank: int, number: signal.Signals
) -> None:
    async def train() -> None:
        async with start_trainer(*TWO_RANKS) as trainer:
            cluster, teachers, loader = trainer.cluster, trainer.teachers, trainer.loader
            engine = list(cluster.rollouts.handles)
            await inject(cluster.actors, rank, point, number)
            with pytest.raises(GkdError) as caught:
                await trainer.fit()
            await cluster.restart_actors(caught.value)
            second = Trainer(trainer.config, cluster, teachers, loader, trainer.start)
            await second.fit()
            assert second.progress.step == second.last_step == 10
            assert cluster.rollouts.handles == engine and (await cluster.metrics())["actor/restarts"] == 1

    asyncio.run(train())
