"""Samples of a training with reference responses and rewards: the trainer's own stages on fake workers and teachers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.data.samples import Prompt, Response, Reward, Sample
from recipe_gkd.errors import DeadlineError, GkdError, RewardError, WorkerDied
from recipe_gkd.metrics.steps import describe
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.runtime.clock import now
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.scoring import setup
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.trainer import RewardContext, Trainer
from teacher.client import ClientSpec
from teacher.errors import TeacherError, TeacherTimeout
from teacher.records import ScoredSequence, TeacherSequence
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.reward_files import reward_file, settings
from tests._support.waiting import PATIENCE_S

N, BATCH, ROWS = 2, 4, 24
SAMPLED = "12"
"""Text of every sampled response. It is the ground truth of row 12."""


def configured(folder: Path, *overrides: str) -> Config:
    rows = {"prompt": [f"{i}+0=" for i in range(ROWS)], "response": [str(i) for i in range(ROWS)]}
    pq.write_table(pa.table(rows | {"ground_truth": rows["response"]}), folder / "data.parquet")
    return base_config(
        f"data.train_files={folder / 'data.parquet'}",
        f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.rollout.n={N}",
        "trainer.scheduler=two_step_off",
        "actor_rollout_ref.rollout.mismatch_bound=null",  # the fake workers have no log-probabilities
        *overrides,
    )


class FakeCluster(Cluster):
    """Rollout workers and a teacher that answer at once. ``deaths``: calls of generate in which the worker dies."""

    capacity = None
    scoring = None
    engine_dtype = "float32"

    def __init__(self, n_replicas: int, deaths: Sequence[int] = ()) -> None:
        self.n_replicas, self.deaths = n_replicas, deaths
        self.generated: list[Prompt] = []
        self.scored: list[TeacherSequence] = []
        self.n_calls = self.n_replaced = 0
        members: Any = self
        self.rollouts, self.weights, self.version = members, members, -1

    def __len__(self) -> int:
        return self.n_replicas

    async def stream(
        self, rank: int, method: object, prompts: list[Prompt], *_call: Any, **_: Any
    ) -> AsyncIterator[list[Response]]:
        assert prompts and all(prompt.reference_ids is None for prompt in prompts)
        call, self.n_calls = self.n_calls, self.n_calls + 1
        for index, prompt in enumerate(prompts):
            if call in self.deaths and index == len(prompts) // 2:
                raise WorkerDied(f"rollout worker {rank}")
            await asyncio.sleep(0)
            self.generated.append(prompt)
            ids = np.array(build_ids(SAMPLED), np.int32)
            logprobs = np.full(len(ids), -0.5, np.float32)
            versions = np.full(len(ids), self.version, np.int32)
            yield [
                Response(
                    uid=prompt.uid,
                    ids=ids,
                    logprobs=logprobs,
                    finish_reason="stop",
                    weights_version=self.version,
                    versions_T=versions,
                )
            ]

    async def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    async def replace_dead_rollouts(self, death: WorkerDied) -> None:
        self.n_replaced += 1

    def submit(
        self, sequences: list[TeacherSequence], timeout_s: float, *, temperature: float
    ) -> Future[list[ScoredSequence]]:
        self.scored += sequences
        scores: Future[list[ScoredSequence]] = Future()
        lengths = [len(sequence.token_ids) - sequence.prompt_len for sequence in sequences]
        scores.set_result(
            [
                ScoredSequence(
                    topk_logps_TK=np.full((T, 2), -1.0, np.float32),
                    topk_ids_TK=np.zeros((T, 2), np.int32),
                    sampled_logps_T=np.full(T, -1, np.float32),
                )
                for T in lengths
            ]
        )
        return scores


TOKENIZER = build_tokenizer()


def build_ids(text: str) -> list[int]:
    return [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]


def build_trainer(
    config: Config, cluster: FakeCluster, scorer: RewardScorer | None = None, teacher: Any = None
) -> Trainer:
    data_set = read_data_set(config.data.train_files, config.data)
    data = PromptData(data_set, config.data, TOKENIZER, with_references=True)
    loader = PromptLoader(
        data,
        config.data,
        n=N,
        epochs=1,
        max_steps=None,
        sft_share=config.gkd.sft_share,
        warmup_steps=config.gkd.warmup_steps,
    )
    reward_context = RewardContext(scorer, RewardItems(data, config.data, TOKENIZER)) if scorer else None
    progress = Progress(0, 0, len(data), config.data.seed, config.data.shuffle)
    teachers = Teachers(config, Routes(("default",)), {"default": teacher or cluster})
    cluster.config = config
    return Trainer(config, cluster, teachers, loader, ResumeState(progress), reward_context)


async def batches_of(trainer: Trainer) -> list[ReadyBatch]:
    batches = []
    async with trainer.pipeline(Timeline(now)) as pipeline:
        async for batch in pipeline:
            async with pipeline.actor_update(batch):
                trainer.advance(batch)
            batches.append(batch)
    return batches


@pytest.mark.parametrize("target", ["data", "teacher"])
@pytest.mark.parametrize(
    ("share", "n_replicas", "deaths"), [(0.5, 3, (1, 4)), (0.25, 1, (0,)), (1.0, 2, ()), (0.0, 2, ())]
)
def test_reference_responses_are_trained_on_once_without_rollout_workers(
    tmp_path: Path, share: float, n_replicas: int, deaths: tuple[int, ...], target: str
) -> None:
    config = configured(tmp_path, f"gkd.sft_share={share}", f"gkd.sft_target={target}")
    cluster = FakeCluster(n_replicas, deaths)
    trainer = build_trainer(config, cluster)
    batches = asyncio.run(batches_of(trainer))

    samples = [sample for batch in batches for sample in batch.samples]
    references = [sample for sample in samples if sample.is_reference]
    sampled = [sample for sample in samples if not sample.is_reference]
    assert len(references) == share * ROWS and len(sampled) == (1 - share) * ROWS * N
    assert sorted({sample.prompt.row for sample in samples}) == list(range(ROWS))
    assert sorted(prompt.uid for prompt in cluster.generated) == [sample.prompt.uid for sample in sampled]
    assert cluster.n_replaced == len(deaths)
    assert trainer.progress.prompts_trained == ROWS and trainer.progress.step == len(batches)
    for sample in references:
        assert sample.response.ids.tolist() == build_ids(str(sample.prompt.row))
        assert not sample.response.logprobs.any() and sample.response.finish_reason == "stop"
        assert np.isneginf(sample.teacher.logps_TK).all() == (target == "data")
    for batch in batches:
        assert all(s.response.weights_version == batch.step for s in batch.samples if s.is_reference)
    assert len(cluster.scored) == len(sampled) + len(references) * (target == "teacher")


def test_warm_up_samples_no_responses(tmp_path: Path) -> None:
    cluster = FakeCluster(n_replicas=1)
    batches = asyncio.run(batches_of(build_trainer(configured(tmp_path, "gkd.warmup_steps=2"), cluster)))
    n_references = [sum(sample.is_reference for sample in batch.samples) for batch in batches]
    n_samples = [len(batch.samples) for batch in batches]
    assert n_references == [BATCH, BATCH, *[0] * (len(batches) - 2)] and len(batches) > 2
    assert n_samples == [BATCH, BATCH, *[BATCH * N] * (len(batches) - 2)]
    assert len(cluster.generated) == sum(n_samples) - sum(n_references)


def test_warm_up_calls_no_reward_function(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return 1.0")
    config = configured(tmp_path, "gkd.warmup_steps=1")
    with RewardScorer(settings(path)) as scorer:
        first, second, *_ = asyncio.run(batches_of(build_trainer(config, FakeCluster(1), scorer)))
    assert not [name for name in describe(first, N) if name.startswith("reward/")]
    assert describe(second, N)["reward/mean"] == 1


def test_sampled_prompts_are_assigned_evenly_among_reference_responses(tmp_path: Path) -> None:
    cluster = FakeCluster(n_replicas=2)
    asyncio.run(batches_of(build_trainer(configured(tmp_path, "gkd.sft_share=0.5"), cluster)))
    assert cluster.n_calls == 2 * ROWS // BATCH  # Each batch has two sampled prompts, one for each worker.


def test_rewards_are_of_sampled_responses_and_in_the_metrics(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "score = float(response == ground_truth)\nreturn {'score': score, 'acc': 1 - score}")
    config = configured(tmp_path, "gkd.sft_share=0.5", "data.shuffle=false")
    with RewardScorer(settings(path)) as scorer:
        batches = asyncio.run(batches_of(build_trainer(config, FakeCluster(2), scorer)))
    for batch in batches:
        for sample in batch.samples:
            assert sample.reward == (None if sample.is_reference else float(str(sample.prompt.row) == SAMPLED))
    with_reward = next(batch for batch in batches if any(sample.prompt.row == 12 for sample in batch.samples))
    metrics = describe(with_reward, N)
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/mean": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/std": 0.5,
        "reward/zero_std_group_fraction": 1.0,
        "reward/acc": 0.5,
    }
    assert metrics["training/sft_share"] == pytest.approx(2 / 6)
    assert metrics["response_seq_len/min"] == metrics["response_seq_len/max"] == 3
    assert metrics["training/staleness_max"] == with_reward.step - min(
        sample.response.weights_version for sample in with_reward.samples
    )


def test_batch_of_reference_responses_has_no_metrics_of_sampled_ones(tmp_path: Path) -> None:
    batch = asyncio.run(batches_of(build_trainer(configured(tmp_path, "gkd.sft_share=1.0"), FakeCluster(1))))[0]
    assert set(describe(batch, N)) == {
        "training/epoch",
        "training/samples",
        "training/sft_share",
        "perf/total_num_tokens",
    }


def test_skipped_samples_keep_their_position_and_reward(tmp_path: Path) -> None:
    class Unreliable(FakeCluster):
        def submit(
            self, sequences: list[TeacherSequence], timeout_s: float, *, temperature: float
        ) -> Future[list[ScoredSequence]]:
            scores = super().submit(sequences, timeout_s, temperature=temperature)
            if len(self.scored) % 3 == 0:
                scores = Future()
                scores.set_exception(TeacherTimeout("late"))
            return scores

    path = reward_file(tmp_path, "return float(response == ground_truth)")
    policy = "actor_rollout_ref.teacher.on_failure=skip_samples"
    config = configured(tmp_path, "gkd.sft_share=0.5", "gkd.sft_target=teacher", policy)
    with RewardScorer(settings(path)) as scorer:
        trainer, undisturbed = (build_trainer(config, cluster, scorer) for cluster in (Unreliable(2), FakeCluster(2)))
        batches, expected = (asyncio.run(batches_of(each)) for each in (trainer, undisturbed))

    def summary(batches: list[ReadyBatch]) -> list[tuple[int, int, float | None]]:
        return [(batch.step, s.prompt.uid, s.reward) for batch in batches for s in batch.samples]

    assert summary(batches) == summary(expected)
    skipped = [sample for batch in batches for sample in batch.samples if sample.is_skipped]
    assert len(skipped) > 5 and {sample.is_reference for sample in skipped} == {True, False}
    assert trainer.progress == replace(undisturbed.progress, skipped_samples=len(skipped))


def test_teacher_and_reward_failures_keep_their_own_errors(tmp_path: Path) -> None:
    """Teacher and reward run at the same time: the reward's failure ends the wait for a silent teacher."""

    class FailingScorer:
        async def score(self, items: Sequence[Any]) -> list[float]:
            raise RewardError("failed", function="the function")

    class SilentTeacher(FakeCluster):
        def submit(
            self, sequences: list[TeacherSequence], timeout_s: float, *, temperature: float
        ) -> Future[list[ScoredSequence]]:
            return Future()  # It is never set, and is canceled when the reward fails.

    class FailingTeacher(FakeCluster):
        def submit(
            self, sequences: list[TeacherSequence], timeout_s: float, *, temperature: float
        ) -> Future[list[ScoredSequence]]:
            raise TeacherError("failed")

    config = configured(tmp_path)
    with raises(RewardError, function="the function"):
        asyncio.run(batches_of(build_trainer(config, FakeCluster(1), FailingScorer(), SilentTeacher(1))))  # type: ignore[arg-type]
    with raises(TeacherError):
        asyncio.run(batches_of(build_trainer(config, FakeCluster(1), None, FailingTeacher(1))))


def test_batch_gets_advantages_before_it_is_divided(tmp_path: Path) -> None:
    class ByUid:
        async def score(self, items: Sequence[Any]) -> list[Reward]:
            return [Reward(float(item.uid % 2)) for item in items]

    advantages: list[float] = []

    def divide(samples: Sequence[Sample]) -> list[list[Sample]]:
        advantages.extend(sample.advantage for sample in samples)
        raise GkdError("the batch was divided")

    path = "custom_reward_function.path=x.py"
    config = configured(tmp_path, "gkd.use_rl_loss=true", path, "gkd.norm_adv_by_std=false")
    trainer = build_trainer(config, FakeCluster(1), ByUid())  # type: ignore[arg-type]
    batch = asyncio.run(first_batch(trainer))
    trainer.cluster.sharding = SimpleNamespace(divide=divide)  # type: ignore[assignment]
    with raises(GkdError):
        asyncio.run(trainer.cluster.update(batch))
    assert advantages == [-0.5, 0.5] * BATCH


def test_hung_object_store_ends_the_update_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the disk hangs to which Ray spills objects."""
    disk = threading.Event()
    monkeypatch.setattr(ray, "put", lambda _: disk.wait(PATIENCE_S))
    trainer = build_trainer(configured(tmp_path, "actor_rollout_ref.actor.timeout_s=0.2"), FakeCluster(1))
    batch = asyncio.run(first_batch(trainer))
    trainer.cluster.sharding = SimpleNamespace(divide=lambda samples: [samples])  # type: ignore[assignment]
    with raises(DeadlineError, phase="update, step 0", waited_s=0.2, silent=()):
        asyncio.run(asyncio.wait_for(trainer.cluster.update(batch), PATIENCE_S))
    disk.set()


async def first_batch(trainer: Trainer) -> ReadyBatch:
    async with trainer.pipeline(Timeline(now)) as pipeline:
        async for batch in pipeline:
            return batch
    raise AssertionError


def test_limit_of_rows_follows_the_actor_ranks_to_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"a": 1000.0, "b": 600.0}
    monkeypatch.setattr(setup, "store_bytes", lambda nodes: {node: stores[node] for node in nodes})
    scoring = ScoringPool({"default": ClientSpec("10.0.0.9", 1, {})}, "driver", lambda *_: None, per_node=1)
    scoring.start_on({"a": "10.0.0.1", "b": "10.0.0.2"})
    trainer = build_trainer(configured(tmp_path), FakeCluster(1))
    trainer.cluster.scoring = scoring
    limits = []
    for home in ("a", "b"):
        scoring.homes = Homes((home,), (0,))
        limits.append(trainer.pipeline(Timeline(now))._state.config.max_row_bytes)
    assert limits == [500, 300]
