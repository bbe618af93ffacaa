"""Ends of a run by a signal or the death of a process: exit status, error message, checkpoints, remaining processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from recipe_gkd.checkpoints.run_lock import locked
from recipe_gkd.diagnostics.exit_messages import SAVED_AND_STOPPED
from recipe_gkd.errors import RunFolderInUse
from recipe_gkd.runtime.process_trees import tree
from teacher.common.process_id import is_alive
from tests._support.errors import raises
from tests._support.training_command import Run, StartRun, Teacher, processes_of_run, running_teacher, stop_service
from tests._support.waiting import PATIENCE_S, wait_until

LONG_RUN = ("trainer.total_epochs=1000", "trainer.save_freq=2", "trainer.scheduler=one_step_off")
DEFAULT_PORT = 15555  # With ``backend=hf`` any other value is refused.


def assert_ended(run: Run, status: int, message: str) -> None:
    """Check status and output of the run, that its latest checkpoint is complete, and that nothing else remains."""
    run.finish()
    assert run.status == status, run.output
    assert message in run.output and "Traceback" not in run.output, run.output
    assert run.leftovers() == []
    latest = (run.folder / "latest_checkpointed_iteration.txt").read_text().strip()
    assert json.loads((run.folder / f"global_step_{latest}" / "trainer.json").read_text())["step"] == int(latest)
    assert not list(run.folder.glob(".*_global_step_*"))
    with locked(run.folder):
        pass


def kill_worker(run: Run, kind: str) -> None:
    """Kill the only worker of a kind. Its checkpoint writers have the same command line; it is the oldest process."""
    pids = {int(line.split()[0]) for line in processes_of_run(run.run_id) if f"ray::{kind}" in line}
    found = [process for process in psutil.process_iter(["create_time"]) if process.pid in pids]
    min(found, key=lambda process: process.info["create_time"]).kill()


class TestSignal:
    @pytest.mark.slow  # tests/unit/runtime has the handling of signals, tests/unit/teachers the teacher `hf`
    def test_sigint_with_hf_teacher_ends_run_in_order(self, start_run: StartRun, student: Path) -> None:
        """The student is its own teacher, in the driver process: in the first step there is nothing to learn.

        The run also serves its metrics and records a profile.
        """
        teacher = "actor_rollout_ref.teacher"
        run = start_run(
            *LONG_RUN,
            f"{teacher}.backend=hf",
            f"{teacher}.model_path={student}",
            f"{teacher}.top_k=8",
            f"{teacher}.server_port={DEFAULT_PORT}",
            "trainer.metrics_port=0",
            "trainer.profile.steps=[2]",
        )
        run.await_step(3)
        [served] = re.findall(
            r"metrics for Prometheus: http://[^:]+:(\d+)/metrics", (run.folder / "run.log").read_text()
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{served}/metrics", timeout=PATIENCE_S) as page:
            assert "recipe_gkd_actor_kl_loss " in page.read().decode()
        with gzip.open(run.folder / "profile" / "step_2_rank_0.json.gz") as profile:
            assert json.load(profile)["traceEvents"]
        with raises(RunFolderInUse, pid=run.process.pid):
            locked(run.folder).__enter__()
        os.killpg(run.process.pid, signal.SIGINT)
        assert_ended(run, 130, "interrupted; the newest checkpoint is ")
        assert "\nto resume from it: python -m recipe_gkd.main_gkd --config-name " in run.output
        assert abs(run.metrics[0]["actor/kl_loss"]) < 1e-5
        assert "teacher default: student, top 8 of 32 ids" in (run.folder / "run.log").read_text()

    @pytest.mark.slow
    def test_sigterm_saves_between_steps_and_same_command_continues(
        self, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        service = ",wandb" if find_spec("wandb") else ""
        command = (*LONG_RUN, "trainer.save_freq=1000", f"trainer.logger=[console,jsonl{service}]")
        run = start_run(*command)
        run.await_step(3)
        run.process.send_signal(signal.SIGTERM)
        assert_ended(run, SAVED_AND_STOPPED, "ended before the last step (SIGTERM)")
        n_steps = len(run.metrics)
        assert f"the newest checkpoint is {run.folder}/global_step_{n_steps}\n" in run.output
        # The limit has passed when the training begins, so that no step is made and nothing is to be saved.
        resumed = start_run(*command, "trainer.save_before=00:00:01")
        assert_ended(resumed, SAVED_AND_STOPPED, "ended before the last step (trainer.save_before)")
        assert f"resumed from {run.folder}/global_step_{n_steps}" in resumed.output
        assert len(resumed.metrics) == n_steps
        if service:
            run_id = (run.folder / "wandb" / "run_id").read_text().strip()
            assert len(list(run.folder.glob(f"wandb/wandb/offline-run-*-{run_id}"))) == 2

    @pytest.mark.slow
    @pytest.mark.parametrize("hybrid", [False, True], ids=["separate pools", "hybrid"])
    def test_stop_in_validation_cancels_it_and_saves(
        self, start_run: StartRun, validation: list[str], hybrid: bool
    ) -> None:
        """Each validation takes minutes. The last step before it is saved."""
        shared = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync") if hybrid else ()
        slow = "actor_rollout_ref.rollout.val_kwargs.n=400"
        options = (slow, "actor_rollout_ref.rollout.val_kwargs.temperature=1", "trainer.test_freq=3")
        command = (*LONG_RUN, "trainer.save_freq=1000", *validation, *options, *shared)
        run = start_run(*command)
        run.await_step(2)
        log = run.folder / "run.log"
        wait_until(lambda: "weight sync v3: begins" in log.read_text())
        run.process.send_signal(signal.SIGUSR1)
        assert_ended(run, SAVED_AND_STOPPED, "ended before the last step (SIGUSR1)")
        assert f"the newest checkpoint is {run.folder}/global_step_3\n" in run.output
        assert "SIGUSR1: the validation after step 3 is left out" in run.output


class TestKilledProcess:
    @pytest.mark.slow  # tests/unit/runtime/test_after_exit.py has the mechanism
    def test_killed_driver_leaves_no_process_and_no_file(self, start_run: StartRun, validation: list[str]) -> None:
        """The run has Ray, an actor, an engine with two tensor-parallel ranks, reward processes and temporary files."""
        run = start_run(
            *LONG_RUN,
            *validation,
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "rollout.n_gpus_per_node=2",
            "ray_init.num_cpus=4",
        )
        run.await_step(1)
        names = " ".join(processes_of_run(run.run_id))
        kinds = ("raylet", "ray::ActorWorker", "VLLM::Worker_TP1", "rewards/child.py")
        assert all(kind in names for kind in kinds), names
        assert list(run.temporary.rglob("vllm_dist_*"))
        # Ray's agents overwrite their environment, so processes_of_run does not find them.
        descendants = tree([run.process.pid])
        run.process.kill()
        run.process.wait()
        assert run.leftovers() == []
        wait_until(lambda: not any(is_alive(process) for process in descendants))

    @pytest.mark.slow  # tests/integration/faults stops an actor rank without a run.
    def test_killed_actor_without_restart_ends_run(self, start_run: StartRun) -> None:
        run = start_run(*LONG_RUN, "trainer.scheduler=two_step_off", "trainer.max_actor_restarts=0")
        run.await_step(3)
        kill_worker(run, "ActorWorker")
        assert_ended(run, 1, "actor worker 0 of 1: its process died")
        assert max(line["training/staleness_max"] for line in run.metrics) <= 2
        [report] = run.folder.glob("diagnosis/*/report.md")
        assert "actor worker 0 of 1" in report.read_text() and str(report.parent) in run.output

    @pytest.mark.slow  # tests/integration/faults kills rollout workers without a run.
    def test_killed_rollout_worker_is_replaced(self, start_run: StartRun) -> None:
        run = start_run(*LONG_RUN, "trainer.scheduler=two_step_off")
        run.await_step(3)
        kill_worker(run, "RolloutWorker")
        run.await_step(len(run.metrics) + 6)
        os.killpg(run.process.pid, signal.SIGINT)
        assert_ended(run, 130, "rollout worker 0 of 1 died; starting another")
        assert max(line["training/staleness_max"] for line in run.metrics) <= 2


class TestStoppedTeacher:
    @pytest.fixture
    def own_teacher(self, teacher_model: Path, tmp_path: Path) -> Iterator[Teacher]:
        """Teacher service that the test may stop."""
        yield from running_teacher(teacher_model, tmp_path / "teacher")

    @pytest.mark.slow
    def test_stopped_teacher_ends_run_after_its_timeout(self, start_run: StartRun, own_teacher: Teacher) -> None:
        teacher = "actor_rollout_ref.teacher"
        run = start_run(*LONG_RUN, f"{teacher}.server_port={own_teacher.port}", f"{teacher}.timeout_s=5")
        run.await_step(3)
        stop_service(own_teacher.run_dir)
        assert_ended(run, 1, f"127.0.0.1:{own_teacher.port}")
