"""Step metrics of a run with known stage times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_stages import BatchTimes, Pools, Stages
from virtual_time import run

from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.metrics.loggers.loggers import Loggers
from recipe_gkd.metrics.steps import StepMetrics, describe, span
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from tests._support.base_config import base_config
from tests._support.tiny_models import make_samples

N_STEPS = 4


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run on-policy with whole batches: 2 s generation, 1 s teacher, 3 s update, 0.5 s sync, 3 s save.

    Returns:
        The lines of metrics.jsonl.
    """
    settings = ["trainer.scheduler=sync", f"trainer.default_local_dir={folder}", "trainer.logger=[jsonl]"]
    config = base_config(*settings, *overrides)
    times = BatchTimes(responses=[2.0] * 8, teacher=1.0, update=3.0, sync=0.5)

    async def driven() -> None:
        stages = Stages(lambda step: times, Pools(n_replicas=2, n_slots=4, n_teachers=1))
        loggers, steps = (
            Loggers(config.trainer, completed_steps=0, last_step=N_STEPS),
            StepMetrics(config, n_rollouts=2),
        )
        with steps:
            async with (
                loggers,
                Pipeline(
                    (stages.batch(step) for step in range(N_STEPS)),
                    PipelineConfig(max_staleness=0, n_replicas=2, capacity=8),
                    stages.callables,
                    timeline=steps.timeline,
                ) as pipeline,
            ):
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


def test_step_time_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    for line in train(tmp_path)[1:-1]:  # the last step has no weight sync
        assert line["timing/other"] == pytest.approx(0, abs=1e-9)
        # Weights are sent between update and save. The next batch is generated and scored during the save.
        assert line["timing/step"] == pytest.approx(0.5 + 3 + 3)
        assert line["timing/update_actor"] == line["timing/save_checkpoint"] == pytest.approx(3)
        assert line["perf/idle_actor"] == pytest.approx(0)
        assert line["perf/idle_rollout"] == pytest.approx(1 - 2.5 / 6.5)
        assert line["perf/idle_teacher"] == pytest.approx(1 - 1 / 6.5)
        assert line["training/mixed_version_fraction"] == 0


def test_throughput_is_per_device_of_both_pools(tmp_path: Path) -> None:
    lines = train(tmp_path, "trainer.n_gpus_per_node=3", "rollout.n_gpus_per_node=2")
    for line in lines:
        assert line["perf/throughput"] == pytest.approx(line["perf/total_num_tokens"] / line["timing/step"] / (3 + 2))
        assert "perf/mfu/actor" not in line


def test_idle_fraction_of_a_teacher_without_service_ignores_the_number_of_workers(tmp_path: Path) -> None:
    teacher = "actor_rollout_ref.teacher"
    line = train(tmp_path, f"{teacher}.backend=hf", f"{teacher}.model_path=x", f"{teacher}.n_server_workers=2")[1]
    assert line["perf/idle_teacher"] == pytest.approx(1 - 1 / 6.5)


def test_lengths_and_rewards_are_of_whole_conversations() -> None:
    """A conversation that is divided into two sequences is one response."""
    first, second, other = (replace(sample, reward=1.0) for sample in make_samples(3))
    lengths = [len(sample.response.ids) for sample in (first, second, other)]
    uid, part = first.prompt.uid, second.response
    second = replace(second, prompt=replace(second.prompt, uid=uid), response=replace(part, uid=uid))
    other = replace(other, reward=0.0, response=replace(other.response, finish_reason="length"))
    metrics = describe(ReadyBatch(step=0, epoch=0.0, dispatched_at=0.0, samples=[first, second, other]))
    assert metrics["response_seq_len/max"] == max(lengths[0] + lengths[1], lengths[2])
    assert metrics["response_seq_len/average"] == sum(lengths) / 2
    assert metrics["response_seq_len/truncated_fraction"] == 0.5
    assert metrics["reward/mean"] == 0.5 and metrics["training/samples"] == 3
