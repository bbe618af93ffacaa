"""An actor rank that is killed or stopped: the run ends, says who, and leaves nothing."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from recipe_gkd.diagnostics.collect import TIMEOUT_S
from recipe_gkd.errors import GkdError
from tests.integration.faults.faulty import DEADLINE_S, Strike, TrainerOf, arm

pytestmark = pytest.mark.timeout(200)

TWO_RANKS = (
    "trainer.n_gpus_per_node=2",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
)


SHUTDOWN_S = 4.0
"""A busy worker has 1 s to close itself, and killing 2 s; and two cores of a busy machine need a moment."""


@pytest.mark.parametrize(
    ("moment", "rank", "number"),
    [
        pytest.param("update", 1, signal.SIGSTOP, id="stopped in update"),
        pytest.param("gather", 1, signal.SIGSTOP, id="stopped in gather", marks=pytest.mark.slow),
        pytest.param("broadcast", 0, signal.SIGSTOP, id="stopped in broadcast", marks=pytest.mark.slow),
        pytest.param("update", 1, signal.SIGKILL, id="killed in update", marks=pytest.mark.slow),
        pytest.param("gather", 1, signal.SIGKILL, id="killed in gather", marks=pytest.mark.slow),
        pytest.param("broadcast", 0, signal.SIGKILL, id="killed in broadcast", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_run_in_time(
    trainer_of: TrainerOf, moment: str, rank: int, number: signal.Signals
) -> None:
    strikes: list[Strike] = []
    error_s: list[float] = []

    async def train() -> None:
        async with trainer_of(*TWO_RANKS) as trainer:
            strikes.append(await arm(trainer.workers.actors, rank, moment, number))
            try:
                await trainer.fit()
            finally:
                error_s.append(strikes[0].seconds)

    with pytest.raises(GkdError, match=f"actor worker {rank}") as caught:
        asyncio.run(train())
    end_s = strikes[0].seconds
    print(f"after the strike: the error {error_s[0]:.1f} s, the end {end_s:.1f} s")
    assert error_s[0] < DEADLINE_S + 5
    assert end_s - error_s[0] < TIMEOUT_S + SHUTDOWN_S
    folder = Path(re.search(r"diagnosis: (\S+)", str(caught.value))[1])  # type: ignore[index]
    report = (folder / "report.md").read_text()
    state = "stopped" if number == signal.SIGSTOP else "gone"
    assert re.search(rf"^\| actor worker {rank} of 2 \|.* {state}", report, re.MULTILINE), report
