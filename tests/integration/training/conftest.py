"""Fixtures: tiny models, data, a teacher service for all tests, and training runs in the background."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests._support.base_config import CONFIG_NAME
from tests._support.repository import REPO
from tests._support.training_command import (
    FULL_OBJECTIVE,
    RUN_ID_VARIABLE,
    Run,
    StartRun,
    Teacher,
    make_model,
    running_teacher,
)


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the student model."""
    return make_model(tmp_path_factory.mktemp("models") / "student", seed=1)


@pytest.fixture(scope="session")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the teacher model."""
    return make_model(tmp_path_factory.mktemp("models") / "teacher", seed=2)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data of 24 rows: 3 batches per epoch."""
    from recipe_gkd.addition.task import make_splits, write_parquet

    path = tmp_path_factory.mktemp("data") / "train.parquet"
    write_parquet(make_splits(0, n_train=24, n_held_out=8, n_dev=8).train, path)
    return path


@pytest.fixture(scope="session")
def validation(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for validation after every second step, on 6 rows: KL, and a reward with verl's signature."""
    from recipe_gkd.addition.task import make_splits, write_parquet

    path = tmp_path_factory.mktemp("data") / "val.parquet"
    write_parquet(make_splits(0, n_train=8, n_held_out=6, n_dev=8).held_out, path)
    return [
        f"data.val_files={path}",
        "data.ground_truth_key=answer",
        f"custom_reward_function.path={REPO / 'tests/_support/verl_reward.py'}",
        "custom_reward_function.num_workers=1",
        "trainer.test_freq=2",
        "trainer.val_kl=true",
    ]


@pytest.fixture(scope="session")
def teacher(teacher_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    """Teacher service."""
    yield from running_teacher(teacher_model, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def settings(student: Path, prompts: Path, teacher: Teacher) -> list[str]:
    """Overrides of every run: float32 on the CPU, short sequences, short deadlines."""
    return [
        f"data.train_files={prompts}",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={student}",
        "actor_rollout_ref.nccl_timeout=60",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "actor_rollout_ref.actor.timeout_s=240",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.timeout_s=240",
        "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32",
        f"actor_rollout_ref.teacher.server_port={teacher.port}",
        "actor_rollout_ref.teacher.timeout_s=120",
        "trainer.device=cpu",
        "trainer.startup_timeout_s=600",
    ]


@contextmanager
def run_starter(settings: list[str], tmp_path: Path) -> Iterator[StartRun]:
    """Yield a function that starts runs in the background. On exit, kill the runs that have not ended."""
    runs: list[Run] = []

    def start(*overrides: str, folder: Path = tmp_path / "run") -> Run:
        run_id = uuid.uuid4().hex
        temporary = Path(tempfile.mkdtemp(prefix="gkd", dir="/tmp"))  # The path of a Unix socket must be short.
        command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-name", CONFIG_NAME]
        process = subprocess.Popen(
            [*command, *settings, f"trainer.default_local_dir={folder}", *overrides],
            env=os.environ | {RUN_ID_VARIABLE: run_id, "TMPDIR": str(temporary), "RAY_TMPDIR": "/tmp"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        runs.append(run := Run(process, folder, run_id, temporary))
        return run

    yield start
    for run in runs:
        if run.status is None:
            with suppress(subprocess.TimeoutExpired):
                run.finish(timeout_s=0.1)
        shutil.rmtree(run.temporary, ignore_errors=True)


@pytest.fixture
def start_run(settings: list[str], tmp_path: Path) -> Iterator[StartRun]:
    """Return a function that starts a run in the background. Remaining processes are killed after the test."""
    with run_starter(settings, tmp_path) as start:
        yield start
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture(scope="session")
def reference_run(settings: list[str], validation: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run of 6 steps without interruption or fault, with which other runs are compared."""
    overrides = ("trainer.scheduler=sync", "trainer.total_epochs=2", "trainer.save_freq=2", *validation)
    with run_starter(settings, tmp_path_factory.mktemp("reference")) as start:
        return start(*overrides, *FULL_OBJECTIVE).finish()
