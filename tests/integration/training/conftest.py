"""Tiny models, a teacher service for all tests, and the command in the background."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests._support.repository import REPO
from tests._support.training_command import MARK, OBJECTIVE, Run, Start, Teacher, make_model, running_teacher


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "student", seed=1)


@pytest.fixture(scope="session")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "teacher", seed=2)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 problems."""
    from recipe_gkd.quickstart.task import make_splits, write_parquet

    path = tmp_path_factory.mktemp("data") / "train.parquet"
    write_parquet(make_splits(0, n_train=24, n_held_out=8, n_dev=8).train, path)
    return path


@pytest.fixture(scope="session")
def validated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides with which a run validates after every other step, on 6 problems, by a reward with verl's signature."""
    from recipe_gkd.quickstart.task import make_splits, write_parquet

    path = tmp_path_factory.mktemp("data") / "val.parquet"
    write_parquet(make_splits(0, n_train=8, n_held_out=6, n_dev=8).held_out, path)
    return [
        f"data.val_files={path}",
        "data.ground_truth_key=answer",
        f"custom_reward_function.path={REPO / 'tests/_support/verl_reward.py'}",
        "custom_reward_function.num_workers=1",
        "trainer.test_freq=2",
    ]


@pytest.fixture(scope="session")
def teacher(teacher_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    """A service of two workers."""
    yield from running_teacher(teacher_model, tmp_path_factory.mktemp("teacher"), n_workers=2)


@pytest.fixture(scope="session")
def settings(student: Path, prompts: Path, teacher: Teacher) -> list[str]:
    return [
        f"data.train_files={prompts}",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={student}",
        "actor_rollout_ref.nccl_timeout=30",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.003",
        "actor_rollout_ref.actor.timeout_s=60",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.timeout_s=60",
        "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32",
        f"actor_rollout_ref.teacher.server_port={teacher.port}",
        "actor_rollout_ref.teacher.timeout_s=30",
        "trainer.device=cpu",
        "trainer.startup_timeout_s=120",
    ]


@contextmanager
def starter(settings: list[str], tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*overrides: str, folder: Path = tmp_path / "run") -> Run:
        mark = uuid.uuid4().hex
        temporary = Path(tempfile.mkdtemp(prefix="gkd", dir="/tmp"))  # short: sockets have their paths in it
        command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-name", "on_policy_distill_trainer"]
        process = subprocess.Popen(
            [*command, *settings, f"trainer.default_local_dir={folder}", *overrides],
            env=os.environ | {MARK: mark, "TMPDIR": str(temporary), "RAY_TMPDIR": "/tmp"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        runs.append(run := Run(process, folder, mark, temporary))
        return run

    yield begin
    for run in runs:
        if run.status is None:
            run.finish(timeout_s=0.1) if run.process.poll() is None else run.finish()
        shutil.rmtree(run.temporary, ignore_errors=True)


@pytest.fixture
def start(settings: list[str], tmp_path: Path) -> Iterator[Start]:
    """``start(*overrides)`` runs the command in the background; whatever is left of it at the end is killed."""
    with starter(settings, tmp_path) as begin:
        yield begin
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture(scope="session")
def whole(settings: list[str], validated: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run from the first step to the last, with nothing between: what others are compared with."""
    overrides = ("trainer.scheduler=sync", "trainer.total_epochs=2", "trainer.save_freq=2", *validated, *OBJECTIVE)
    with starter(settings, tmp_path_factory.mktemp("whole")) as begin:
        return begin(*overrides).finish()
