"""launch/slurm.sbatch: its directives, and refusals without a job."""

from __future__ import annotations

import os
import re
import subprocess

from tests._support.repository import REPO

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
