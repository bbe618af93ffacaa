"""Real workers of both pools in this process's Ray session, trained with a constant teacher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import ray.cloudpickle

from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.cluster_start import start_cluster
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.trainer import Trainer
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from tests._support.base_config import base_config
from tests.integration.faults import faulty
from tests.integration.faults.faulty import DEADLINE_S, Census, TrainerFactory


class ConstantTeacher:
    """A teacher client that scores every position with the same four tokens."""

    def hello(self, timeout_s: float) -> TeacherInfo:
        raise NotImplementedError

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        done: Future[list[ScoredSequence]] = Future()
        lengths = [len(sequence.token_ids) - sequence.prompt_len for sequence in sequences]
        done.set_result(
            [
                ScoredSequence(
                    topk_logps_TK=np.full((n, 4), -2.0, np.float32),
                    topk_ids_TK=np.tile(np.arange(4, dtype=np.int32), (n, 1)),
                    sampled_logps_T=np.full(n, -2.0, np.float32),
                )
                for n in lengths
            ]
        )
        return done


@pytest.fixture(scope="session")
def tiny_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests._support.training_command import make_model

    return make_model(tmp_path_factory.mktemp("faults") / "student", seed=1)


@pytest.fixture
def census() -> Census:
    return Census()


@pytest.fixture
def start_trainer(
    ray_session: None, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, census: Census
) -> TrainerFactory:
    """Return a factory of trainers. It takes config overrides and returns an async context manager.

    The workers accept :func:`faulty.inject`. On exit, none of their processes may run.
    """
    import transformers

    from recipe_gkd.addition.task import make_splits, write_parquet

    ray.cloudpickle.register_pickle_by_value(faulty)
    monkeypatch.setattr("recipe_gkd.cluster_start.ActorWorker", faulty.FaultyActor)
    monkeypatch.setattr("recipe_gkd.cluster_start.RolloutWorker", faulty.FaultyRollout)
    write_parquet(make_splits(0, n_train=40, n_held_out=8, n_dev=8).train, tmp_path / "train.parquet")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tiny_student))

    @asynccontextmanager
    async def start(*overrides: str) -> AsyncIterator[Trainer]:
        config = base_config(
            f"data.train_files={tmp_path}/train.parquet",
            "data.max_prompt_length=16",
            "data.max_response_length=12",
            "data.train_batch_size=4",
            f"actor_rollout_ref.model.path={tiny_student}",
            f"actor_rollout_ref.nccl_timeout={DEADLINE_S}",
            "actor_rollout_ref.actor.megatron.dtype=float32",
            f"actor_rollout_ref.actor.timeout_s={DEADLINE_S}",
            "actor_rollout_ref.rollout.dtype=float32",
            f"actor_rollout_ref.rollout.timeout_s={DEADLINE_S}",
            "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32",
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes=0.05",
            "rollout.n_gpus_per_node=2",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={tmp_path}/run",
            "trainer.startup_timeout_s=600",
            "trainer.logger=[jsonl]",
            *overrides,
        )
        data = PromptData(read_data_set(config.data.train_files, config.data), config.data, tokenizer)
        loader = PromptLoader(data, config.data, n=1, epochs=1, max_steps=None)
        progress = Progress(0, 0, len(data), config.data.seed, config.data.shuffle)
        (tmp_path / "run").mkdir(exist_ok=True)
        try:
            async with start_cluster(config, "cpu", total_steps=8, stop_token_ids=(), n_tokens=None) as cluster:
                await census.take(cluster)
                try:
                    teachers = Teachers(config, Routes(("default",)), {"default": ConstantTeacher()})
                    yield Trainer(config, cluster, teachers, loader, ResumeState(progress))
                finally:
                    await census.take(cluster)
        finally:
            assert len(census) >= 2 and census.alive() == []

    return start
