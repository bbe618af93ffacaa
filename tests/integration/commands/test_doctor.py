"""``doctor`` on real workers: Ray, a Megatron actor and a vLLM engine on the CPU, and a teacher service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_gkd.addition.task import make_splits, write_parquet
from tests._support.training_command import RUN_ID_VARIABLE, Teacher, make_model, processes_of_run, running_teacher
from tests._support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

LIVE_CHECKS = ["workers", "shared folder", "weight sync", "rollout mismatch", "loss"]
HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    """Teacher service with another model of the student's vocabulary."""
    folder = tmp_path_factory.mktemp("teacher")
    yield from running_teacher(make_model(folder / "model", seed=2), folder / "run")


@pytest.mark.parametrize("overrides", [(), HYBRID], ids=["separate", "hybrid"])
def test_healthy_run_passes_all_live_checks(tmp_path: Path, teacher: Teacher, overrides: tuple[str, ...]) -> None:
    data, folder, run_id = tmp_path / "train.parquet", tmp_path / "run", uuid.uuid4().hex
    write_parquet(make_splits(0, n_train=8, n_held_out=8, n_dev=8).train, data)
    keys = [
        f"data.train_files={data}",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={make_model(tmp_path / 'student', seed=1)}",
        "actor_rollout_ref.nccl_timeout=60",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32",
        f"actor_rollout_ref.teacher.server_port={teacher.port}",
        "trainer.device=cpu",
        "trainer.startup_timeout_s=600",
        f"trainer.default_local_dir={folder}",
        "ray_init.num_cpus=2",
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "recipe_gkd", "doctor", *keys, "--json"],
        env=os.environ | {RUN_ID_VARIABLE: run_id},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
    )
    report = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert done.returncode == 0 and report["passed"], (report, done.stderr)
    assert [found[check]["severity"] for check in LIVE_CHECKS] == ["ok"] * len(LIVE_CHECKS)
    assert not folder.exists(), "the command must leave nothing"
    wait_until(lambda: not processes_of_run(run_id))  # the guard of Ray lives for a few seconds longer
