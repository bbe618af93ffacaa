"""An actor rank that is killed or stopped: the run ends, says who, and leaves nothing."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path

import pytest
from faulty import DEADLINE_S, TrainerOf, lives

from recipe_gkd.errors import GkdError

pytestmark = pytest.mark.timeout(200)

TWO_RANKS = (
    "trainer.n_gpus_per_node=2",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
)


@pytest.mark.parametrize(
    ("moment", "rank", "number"),
    [
        pytest.param("update", 1, signal.SIGSTOP, id="stopped in update"),
        pytest.param("update", 1, signal.SIGKILL, id="killed in update", marks=pytest.mark.slow),
        pytest.param("gather", 1, signal.SIGKILL, id="killed in gather", marks=pytest.mark.slow),
        pytest.param("broadcast", 0, signal.SIGKILL, id="killed in broadcast", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_run_in_time(
    trainer_of: TrainerOf, moment: str, rank: int, number: signal.Signals
) -> None:
    times: list[float] = []
    pids: list[int] = []

    async def train() -> None:
        async with trainer_of(*TWO_RANKS) as trainer:
            actors = trainer.workers.actors
            pids.append(await actors.call_one(rank, "strike", moment, number, timeout_s=20, phase="arm"))
            times.append(time.monotonic())
            await trainer.fit()

    with pytest.raises(GkdError, match=f"actor worker {rank}") as caught:
        asyncio.run(train())
    assert time.monotonic() - times[0] < 3 * DEADLINE_S  # steps before, the deadline, the diagnosis, the end
    assert not any(map(lives, pids))
    folder = Path(re.search(r"diagnosis: (\S+)", str(caught.value))[1])  # type: ignore[index]
    assert f"actor worker {rank}" in (folder / "report.md").read_text()
