"""A training whose rollout engine computes another model than the actor ends with an error that says so."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from recipe_gkd.errors import ModelMismatch
from tests._support.engine_faults import scale_rope
from tests._support.errors import raises
from tests.integration.faults.faulty import TrainerFactory


@pytest.mark.parametrize(
    ("scheduler", "source"),
    [
        # tests/unit has the comparison, and test_model_check.py compares an engine after a sync.
        pytest.param("sync", "the batch", id="by the update", marks=pytest.mark.slow),
        pytest.param("one_step_off", "rollout worker 0 of 1", id="after a sync", marks=pytest.mark.slow),
    ],
)
def test_engine_with_other_rope_scaling_warns_at_once_and_ends_the_run(
    start_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture, scheduler: str, source: str
) -> None:
    """All bytes of every sync are right: only the engine's table of rotations differs."""

    def plant(worker: Any) -> None:
        scale_rope(worker)

    async def train() -> int:
        patience = "actor_rollout_ref.rollout.mismatch_patience=2"
        async with start_trainer(f"trainer.scheduler={scheduler}", "rollout.n_gpus_per_node=1", patience) as trainer:
            await trainer.cluster.rollouts.handles[0].__ray_call__.remote(plant)
            with raises(ModelMismatch, n_steps=2, sources=(source,)):
                await trainer.fit()
            return trainer.progress.step

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(train()) == 1
    assert "step 1: the rollout engine computes another model than the actor" in caplog.text
