"""However a run ends, it says why, keeps its checkpoints, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_gkd.checkpoints.run_lock import locked
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.process_id import is_alive
from recipe_gkd.runtime.process_trees import tree
from tests._support.training_command import Run, Start, Teacher, processes_marked, running_teacher, script

pytestmark = pytest.mark.timeout(300)

LONG = ("trainer.total_epochs=1000", "trainer.save_freq=2", "trainer.scheduler=one_step_off")


def assert_ended(run: Run, status: int, says: str, timeout_s: float) -> None:
    run.finish(timeout_s=timeout_s)
    assert run.status == status, run.output
    assert says in run.output and "Traceback" not in run.output, run.output
    assert run.leftovers() == []
    latest = (run.folder / "latest_checkpointed_iteration.txt").read_text().strip()
    assert json.loads((run.folder / f"global_step_{latest}" / "trainer.json").read_text())["step"] == int(latest)
    assert not list(run.folder.glob(".*_global_step_*"))
    with locked(run.folder):
        pass


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
    with pytest.raises(ConfigError, match=f"in use by another run, on host .* with pid {run.process.pid}"):
        locked(run.folder).__enter__()
    os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
    assert_ended(run, status, says, timeout_s=60)


def test_nothing_is_left_of_a_run_whose_driver_is_killed(start: Start, validated: list[str]) -> None:
    """Driver, Ray, actors, engines with two tensor ranks, and reward processes; and their temporary files."""
    run = start(
        *LONG,
        *validated,
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "rollout.n_gpus_per_node=2",
        "ray_init.num_cpus=4",
    )
    run.await_step(1, timeout_s=200)
    names = " ".join(processes_marked(run.mark))
    assert all(kind in names for kind in ("raylet", "ray::ActorWorker", "VLLM::Worker_TP1", "rewards/child.py")), names
    assert list(run.temporary.rglob("vllm_dist_*"))
    # Ray's agents overwrite the environment by which the others are found.
    descendants = tree([run.process.pid])
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 15
    assert run.leftovers(patience_s=15) == []
    while (alive := [process for process in descendants if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive == []


def kill(run: Run, kind: str) -> None:
    [victim] = [line for line in processes_marked(run.mark) if f"ray::{kind}" in line]
    os.kill(int(victim.split()[0]), signal.SIGKILL)


def test_a_killed_rollout_worker_is_replaced_and_a_killed_actor_is_named(start: Start) -> None:
    run = start(*LONG, "trainer.scheduler=two_step_off")
    run.await_step(3)
    kill(run, "RolloutWorker")
    at = len(run.metrics)
    run.await_step(at + 6)
    kill(run, "ActorWorker")
    assert_ended(run, 1, "actor worker 0 of 1 died", timeout_s=60)
    assert "rollout worker 0 of 1 died; starting another" in run.output
    assert max(line["training/staleness_max"] for line in run.metrics) <= 2
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
