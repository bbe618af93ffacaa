"""However a run ends, it says why, keeps its checkpoints, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Run, Start, Teacher, processes_marked, running_teacher, script

pytestmark = pytest.mark.timeout(300)

LONG = ("trainer.total_epochs=1000", "trainer.save_freq=2", "trainer.scheduler=one_step_off")


def assert_ended(run: Run, status: int, says: str, timeout_s: float) -> None:
    run.finish(timeout_s=timeout_s)
    assert run.status == status, run.output
    assert says in run.output and "Traceback" not in run.output, run.output
    assert run.leftovers() == []
    latest = (run.folder / "latest_checkpointed_iteration.txt").read_text().strip()
    assert json.loads((run.folder / f"global_step_{latest}" / "trainer.json").read_text())["step"] == int(latest)
    assert not list(run.folder.glob(".writing*"))


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_in_order(start: Start, number: signal.Signals, status: int, says: str) -> None:
    run = start(*LONG)
    run.await_step(3)
    os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
    assert_ended(run, status, says, timeout_s=30)


def kill(run: Run, kind: str) -> None:
    [victim] = [line for line in processes_marked(run.mark) if f"ray::{kind}" in line]
    os.kill(int(victim.split()[0]), signal.SIGKILL)


def test_a_killed_rollout_worker_is_replaced_and_a_killed_actor_is_named(start: Start) -> None:
    run = start(*LONG)
    run.await_step(3)
    kill(run, "RolloutWorker")
    at = len(run.metrics)
    run.await_step(at + 6)
    kill(run, "ActorWorker")
    assert_ended(run, 1, "actor worker 0 of 1 died", timeout_s=60)
    assert "rollout worker 0 of 1 died; starting another" in run.output
    assert max(line["training/staleness_max"] for line in run.metrics) <= 1
    [report] = run.folder.glob("diagnosis/*/report.md")
    assert "actor worker 0 of 1" in report.read_text() and str(report.parent) in run.output


@pytest.fixture
def mortal_teacher(teacher_model: Path, tmp_path: Path) -> Iterator[Teacher]:
    yield from running_teacher(teacher_model, tmp_path / "teacher")


@pytest.mark.slow
def test_a_teacher_that_goes_away_is_named_after_its_deadline(start: Start, mortal_teacher: Teacher) -> None:
    run = start(
        *LONG, f"actor_rollout_ref.teacher.server_port={mortal_teacher.port}", "actor_rollout_ref.teacher.timeout_s=5"
    )
    run.await_step(3)
    script("stop_server.sh", RUN_DIR=mortal_teacher.run_dir)
    assert_ended(run, 1, f"127.0.0.1:{mortal_teacher.port}", timeout_s=40)
