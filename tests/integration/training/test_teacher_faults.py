"""A training run and a teacher service whose processes are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.training_command import OBJECTIVE, Run, Start, Teacher, running_teacher, script

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def two_workers(teacher_model: Path, tmp_path: Path) -> Iterator[Teacher]:
    yield from running_teacher(teacher_model, tmp_path / "teacher", n_workers=2)


def kill(teacher: Teacher, worker: int) -> None:
    os.kill(int((teacher.run_dir / f"worker-{worker}.pid").read_text().split()[0]), signal.SIGKILL)


def test_a_run_whose_teacher_workers_are_killed_one_after_the_other_is_the_undisturbed_one(
    start: Start, two_workers: Teacher, validated: list[str], whole: Run, tmp_path: Path
) -> None:
    """Of two workers none is left, then one joins: the run waits, and each prompt is trained on once."""
    run = start(
        "trainer.scheduler=sync",
        "trainer.total_epochs=2",
        *validated,
        *OBJECTIVE,
        f"actor_rollout_ref.teacher.server_port={two_workers.port}",
        "actor_rollout_ref.teacher.timeout_s=90",
    )
    run.await_step(1)
    kill(two_workers, 0)
    run.await_step(3)
    kill(two_workers, 1)
    joining = two_workers.run_dir / "joining"
    try:
        joined = script("join_server.sh", RUN_DIR=joining, **two_workers.settings)
        assert joined.returncode == 0, joined.stderr
        run.finish()
    finally:
        script("stop_server.sh", RUN_DIR=joining)
    assert run.status == 0, run.output
    said = [line for line in run.output.splitlines() if "teacher default at tcp://" in line]
    assert len(said) == 2 and "has no worker (the last one died or hung" in said[0] and " again, after " in said[1], (
        said
    )
    assert [line["training/global_step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    for disturbed, undisturbed in zip(run.metrics, whole.metrics, strict=True):
        for metric in ("training/epoch", "perf/total_num_tokens", "response_seq_len/average", "teacher/default/tokens"):
            assert disturbed[metric] == undisturbed[metric]
        for metric in ("actor/kl_loss", "actor/sft_loss", "reward/mean", "actor/grad_norm"):
            assert disturbed[metric] == pytest.approx(undisturbed[metric], rel=1e-3)
        assert disturbed["teacher/skipped_samples"] == 0
    assert run.leftovers() == []
