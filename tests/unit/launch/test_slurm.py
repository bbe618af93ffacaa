"""launch/slurm.sbatch: its directives, refusals without a job, and the end of a job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests._support import fake_slurm
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S, wait_until

SCRIPT = REPO / "launch" / "slurm.sbatch"
PATTERNS = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": "1",  # srun starts one `ray start` per node
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "mem": "0",
    "exclusive": "",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"B:USR1@\d+",  # B: to the script only, which passes it to the training
    "requeue": "",
    "open-mode": "append",
    "output": r"slurm-%j\.log",
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | variables
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=20, check=False
    )


def test_directives_are_known_and_precede_the_commands() -> None:
    lines = SCRIPT.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH")]
    assert [name for name, *_ in directives] == list(PATTERNS)
    assert all(re.fullmatch(PATTERNS[name], value) for name, _, value in directives)
    assert not [line for line in lines[end:] if line.startswith("#SBATCH")]  # sbatch would ignore it


def test_script_is_valid_and_has_help() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    shown = run("--help")
    assert shown.returncode == 0 and "sbatch" in shown.stdout and "set -euo" not in shown.stdout


def test_start_from_the_model_in_a_folder_that_may_have_checkpoints_is_refused() -> None:
    refused = run("trainer.resume_mode=disable", SLURM_SUBMIT_DIR=str(REPO))
    assert refused.returncode == 2 and "another trainer.experiment_name" in refused.stderr


def test_script_outside_of_a_job_is_refused() -> None:
    refused = run()
    assert refused.returncode == 1 and "submit it with: sbatch launch/slurm.sbatch" in refused.stderr


STUB = """#!/bin/bash
# Python, without Ray: the cluster gets N_NODES nodes, and the training ends with STATUS.
case "$*" in
  *get_node_ip_address*) echo 127.0.0.1 ;;
  *ray.scripts*)
    for argument in "$@"; do [[ $argument != --temp-dir=* ]] || mkdir "${argument#*=}"; done
    trap "$ON_TERM" TERM
    echo "ray started" >>"$EVENTS"
    while :; do sleep 0.05; done ;;
  *ray.nodes*)
    started=$(grep -c "ray started" "$EVENTS") || true
    echo $((started < N_NODES ? started : N_NODES)) ;;
  *recipe_gkd.main_gkd*) exit "$STATUS" ;;
esac
"""


class TestEnd:
    """Ends of a job on two nodes. All commands of SLURM and Ray are stand-ins."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
        """Return a function that starts the script with variables of the stand-ins."""
        fake_slurm.install(tmp_path, "", STUB)
        job_id, jobs = str(os.getpid()), []
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "python"),
            "EVENTS": str(tmp_path / "events"),
            "SLURM_SUBMIT_DIR": str(REPO),
            "SLURM_JOB_ID": job_id,
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SLURM_CPUS_PER_TASK": "1",
        }
        script = tmp_path / "slurm.sbatch"
        script.write_text(SCRIPT.read_text().replace("end_timeout_s=30", "end_timeout_s=1"))

        def start_job(*, n_nodes: int, status: int = 0, on_term: str = "exit 0") -> subprocess.Popen[bytes]:
            variables = {"N_NODES": str(n_nodes), "STATUS": str(status), "ON_TERM": on_term}
            with (tmp_path / "output").open("w") as file:
                command = ["bash", str(script)]
                jobs.append(subprocess.Popen(command, env=environment | variables, stdout=file, stderr=file))
            return jobs[-1]

        yield start_job
        for job in jobs:
            job.kill()
            job.wait(PATIENCE_S)
        shutil.rmtree(f"/tmp/ray_{job_id}", ignore_errors=True)

    def events(self, folder: Path) -> list[str]:
        path = folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    @pytest.mark.parametrize(("status", "is_kept"), [(0, False), (1, True)])
    def test_files_of_ray_stay_after_a_failure_only(
        self, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, status: int, is_kept: bool
    ) -> None:
        assert start(n_nodes=2, status=status).wait(PATIENCE_S) == status, (tmp_path / "output").read_text()
        folder = Path(f"/tmp/ray_{os.getpid()}")
        assert folder.exists() is is_kept and (str(folder) in (tmp_path / "output").read_text()) is is_kept
        assert ("srun --overlap --nodes=2 --ntasks=2 rm -rf " + str(folder) in self.events(tmp_path)) is not is_kept

    def test_signal_before_the_training_requeues_the_job(
        self, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
    ) -> None:
        job = start(n_nodes=0)
        wait_until(lambda: "ray started" in self.events(tmp_path))
        job.send_signal(signal.SIGUSR1)
        assert job.wait(PATIENCE_S) == 75, (tmp_path / "output").read_text()
        assert self.events(tmp_path)[-1] == f"scontrol requeue {os.getpid()}"
        assert not Path(f"/tmp/ray_{os.getpid()}").exists()

    def test_ray_that_ignores_its_signal_does_not_prevent_the_requeue(
        self, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
    ) -> None:
        job = start(n_nodes=2, status=75, on_term=":")
        assert job.wait(PATIENCE_S) == 75, (tmp_path / "output").read_text()
        assert self.events(tmp_path)[-1] == f"scontrol requeue {os.getpid()}"
