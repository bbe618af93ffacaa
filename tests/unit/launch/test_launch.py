"""Scripts under launch/: help texts, and configurations of the run scripts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests._support.repository import REPO

VARIABLES = {
    "TRAIN_FILES": "train.parquet",
    "STUDENT": "/models/student",
    "TEACHER_IP": "10.0.0.9",
    "OUTPUT_DIR": "/shared/run",
    "AUTH_DIR": "/shared/teacher-keys",
}


def bash(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=os.environ | VARIABLES,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", sorted((REPO / "launch").glob("run_qwen*.sh")), ids=lambda path: path.stem)
def test_run_script_configuration_is_valid(script: Path) -> None:
    shown = bash(script, "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    assert "path: /models/student" in shown.stdout


@pytest.mark.parametrize("script", sorted((REPO / "launch").glob("*.sh")), ids=lambda path: path.stem)
def test_script_help_describes_script(script: Path) -> None:
    shown = bash(script, "--help")
    assert shown.returncode == 0 and f"launch/{script.name}" in shown.stdout
    assert "set -euo" not in shown.stdout


def test_quickstart_unknown_argument_is_refused() -> None:
    refused = bash(REPO / "launch" / "quickstart.sh", "--frehs")
    assert refused.returncode == 2 and "unknown argument --frehs" in refused.stderr
