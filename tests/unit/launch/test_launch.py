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


@pytest.fixture
def printing_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the command `ray` by one that prints its arguments."""
    (tmp_path / "ray").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    monkeypatch.setenv("CKPT_PATH", "/models/teacher")


@pytest.mark.parametrize("name", ["run_qwen2.5_ray_cluster.sh", "run_teacher_on_ray.sh"])
def test_ray_job_gets_variables_of_the_shell(name: str, printing_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7,eth8")
    monkeypatch.setenv("VLLM_X", "two words")
    submitted = bash(REPO / "launch" / name)
    assert submitted.returncode == 0, submitted.stderr
    arguments = submitted.stdout.splitlines()
    entry = arguments[arguments.index("--") + 1 :]
    assert entry[0] == "env" and {"NCCL_SOCKET_IFNAME=eth7,eth8", "VLLM_X=two words"} <= set(entry[: entry.index("-m")])
    assert entry[entry.index("-m") - 1] == "python3" and not [word for word in entry if word.startswith("PATH=")]


@pytest.mark.parametrize(
    ("trusted", "auth_dir", "expected"),
    [
        ("", "/keys", ["--auth-dir", "/keys"]),
        ("1", "", ["--trusted-network"]),
        ("1", "/keys", ["--trusted-network", "--auth-dir", "/keys"]),  # launch.teacher_on_ray refuses both
    ],
)
def test_teacher_job_gets_keys_or_trusted_network(
    trusted: str, auth_dir: str, expected: list[str], printing_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUSTED_NETWORK", trusted)
    monkeypatch.setitem(VARIABLES, "AUTH_DIR", auth_dir)
    arguments = bash(REPO / "launch" / "run_teacher_on_ray.sh").stdout.splitlines()
    assert arguments[arguments.index("--tp-size") + 2 : arguments.index("--ckpt-path")] == expected
