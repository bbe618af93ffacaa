"""Scripts under launch/: help texts, and configurations of the run scripts."""

from __future__ import annotations

import os
import shutil
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
    assert "path: /models/student" in shown.stdout and "warning:" not in shown.stderr


@pytest.mark.parametrize("script", sorted((REPO / "launch").glob("*.sh")), ids=lambda path: path.stem)
def test_script_help_describes_script(script: Path) -> None:
    shown = bash(script, "--help")
    assert shown.returncode == 0 and f"launch/{script.name}" in shown.stdout
    assert "set -euo" not in shown.stdout


def test_quickstart_unknown_argument_is_refused() -> None:
    refused = bash(REPO / "launch" / "quickstart.sh", "--frehs")
    assert refused.returncode == 2 and "unknown argument --frehs" in refused.stderr


def test_setup_refuses_to_replace_torch_for_gpus(tmp_path: Path) -> None:
    for name in ("launch/setup.sh", "setup.cfg", "constraints/cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    library = tmp_path / ".venv/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    refused = bash(tmp_path / "launch" / "setup.sh")
    assert refused.returncode == 1 and "has torch for GPUs" in refused.stderr and "--fresh" in refused.stderr
    assert library.exists()


def test_one_node_script_takes_the_interpreter_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "/bin/echo")
    assert bash(REPO / "launch" / "run_qwen2.5_one_node.sh", "--cfg").stdout.startswith("-m recipe_gkd.main_gkd")
