"""What a step's metrics say of a run whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipeline_stages import BatchTimes, Pools, Stages
from virtual_time import run

from recipe_gkd.config import load_config
from recipe_gkd.metrics.loggers import Loggers
from recipe_gkd.metrics.steps import StepMetrics, span
from recipe_gkd.pipeline.interface import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline

N_STEPS = 4


def train(folder: Path) -> list[dict[str, float]]:
    """On-policy, whole batches: 2 s of two workers, 1 s of the teacher, 3 s of update, 0.5 s of sync, 3 s of save."""
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=x", "trainer.scheduler=sync"]
    config = load_config(
        "on_policy_distill_trainer",
        [*needed, f"trainer.default_local_dir={folder}", "trainer.logger=[jsonl]"],
    )
    times = BatchTimes(responses=[2.0] * 8, teacher=1.0, update=3.0, sync=0.5)

    async def driven() -> None:
        stages = Stages(lambda step: times, Pools(n_replicas=2, n_slots=4, n_teachers=1))
        with (
            Loggers(config.trainer, first_step=0, last_step=N_STEPS) as loggers,
            StepMetrics(config, n_rollouts=2) as steps,
        ):
            async with Pipeline(
                (stages.batch(step) for step in range(N_STEPS)),
                PipelineConfig(max_staleness=0, n_replicas=2, capacity=8),
                stages.callables,
                timeline=steps.timeline,
            ) as pipeline:
                async for batch in pipeline:
                    async with pipeline.actor_update(batch):
                        with span(batch.metrics, "timing/update_actor"):
                            await stages.update(batch.step)
                    async with pipeline.actor_lock("save_checkpoint", batch):
                        with span(batch.metrics, "timing/save_checkpoint"):
                            await stages.update(batch.step)
                    steps.log(loggers, batch, batch.step + 1)

    run(driven())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_accounted_for_and_pools_idle_while_others_work(tmp_path: Path) -> None:
    for line in train(tmp_path)[1:-1]:  # the last one has no weights to send
        assert line["timing/other"] == pytest.approx(0, abs=1e-9)
        # The next weights go out between update and save, during which the next batch is generated and scored.
        assert line["timing/step"] == pytest.approx(0.5 + 3 + 3)
        assert line["timing/update_actor"] == line["timing/save_checkpoint"] == pytest.approx(3)
        assert line["perf/idle_actor"] == pytest.approx(0)
        assert line["perf/idle_rollout"] == pytest.approx(1 - 2.5 / 6.5)
        assert line["perf/idle_teacher"] == pytest.approx(1 - 1 / 6.5)
        assert line["training/mixed_version_fraction"] == 0
