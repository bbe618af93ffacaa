"""Training run with a teacher service whose worker is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.teacher_service import run_script
from tests._support.training_command import FULL_OBJECTIVE, Run, StartRun, Teacher, running_teacher, stop_service


@pytest.fixture
def own_teacher(teacher_model: Path, tmp_path: Path) -> Iterator[Teacher]:
    """Teacher service with one worker, which the test may kill."""
    yield from running_teacher(teacher_model, tmp_path / "teacher")


def kill_worker(teacher: Teacher) -> None:
    os.kill(int((teacher.run_dir / "worker-0.pid").read_text().split()[0]), signal.SIGKILL)


def assert_same_training(run: Run, expected: Run) -> None:
    """Check that both runs trained on the same responses, with the same losses up to rounding."""
    for line, expected_line in zip(run.metrics, expected.metrics, strict=True):
        for metric in ("training/epoch", "perf/total_num_tokens", "response_seq_len/average", "teacher/default/tokens"):
            assert line[metric] == expected_line[metric]
        for metric in ("actor/kl_loss", "actor/sft_loss", "reward/mean", "actor/grad_norm"):
            assert line[metric] == pytest.approx(expected_line[metric], rel=1e-3)
        assert line["teacher/skipped_samples"] == 0


@pytest.mark.slow  # tests/integration/teacher/test_chaos.py: no request is lost
def test_run_after_loss_of_last_teacher_worker_equals_undisturbed_run(
    start_run: StartRun, own_teacher: Teacher, validation: list[str], reference_run: Run
) -> None:
    """The run waits from the death of the only worker until a new one joins. It trains on each prompt once."""
    run = start_run(
        "trainer.scheduler=sync",
        "trainer.total_epochs=2",
        *validation,
        *FULL_OBJECTIVE,
        f"actor_rollout_ref.teacher.server_port={own_teacher.port}",
        "actor_rollout_ref.teacher.timeout_s=90",
    )
    run.await_step(2)
    kill_worker(own_teacher)
    new_worker_dir = own_teacher.run_dir / "joining"
    try:
        joined = run_script("join_server.sh", RUN_DIR=str(new_worker_dir), **own_teacher.settings)
        assert joined.returncode == 0, joined.stderr
        run.finish()
    finally:
        stop_service(new_worker_dir)
    assert run.status == 0, run.output
    messages = [line for line in run.output.splitlines() if "teacher default at tcp://" in line]
    assert len(messages) == 2, messages
    assert "has no worker (last removal: died or hung" in messages[0] and " again, after " in messages[1], messages
    assert [line["training/global_step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert_same_training(run, reference_run)
    assert run.leftovers() == []
