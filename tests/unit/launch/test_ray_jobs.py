"""Scripts under launch/ that submit Ray jobs: the words that reach the process of the job on a node of the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe_gkd.config.caller import VARIABLE
from recipe_gkd.config.load import read_config
from tests._support.repository import REPO
from tests.unit.launch.test_run_simple import NAME_WITH_SYNTAX

VARIABLES = {
    "TRAIN_FILES": "/shared/train.parquet",
    "STUDENT": "/models/student",
    "TEACHER_IP": "10.0.0.9",
    "OUTPUT_DIR": "/shared/run",
    "AUTH_DIR": "/shared/teacher-keys",
    "RAY_ADDRESS": "http://head:8265",
    "CKPT_PATH": "/models/teacher",
}
RAY = """import os, shlex, subprocess, sys
words = sys.argv[sys.argv.index("--") + 1 :]
# In ray/dashboard/modules/job, cli.py joins the words, and job_supervisor.py runs the text in a shell of the node.
done = subprocess.run(shlex.join(words), shell=True, cwd="/", env={"PATH": os.environ["PATH"]})
sys.exit(done.returncode)
"""
PYTHON = """import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
Submit = Callable[..., tuple[list[str], dict[str, str]]]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Return a function that runs a script and returns arguments and environment of the job's process."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, source in (("ray", RAY), ("python3", PYTHON)):
        (commands / name).write_text(f"#!{sys.executable}\n{source}")
        (commands / name).chmod(0o755)

    def run(script: str, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        environment = os.environ | VARIABLES | variables | {"PATH": f"{commands}:{os.environ['PATH']}"}
        submitted = subprocess.run(
            ["bash", str(REPO / "launch" / script), *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert submitted.returncode == 0, submitted.stderr
        words, inherited = json.loads(submitted.stdout)
        return words, inherited

    return run


@pytest.mark.parametrize("name", ["run_qwen2.5_ray_cluster.sh", "run_teacher_on_ray.sh"])
def test_job_gets_variables_of_the_shell(name: str, submit: Submit) -> None:
    words, environment = submit(name, NCCL_SOCKET_IFNAME="eth7,eth8", VLLM_X="two words; $PATH")
    assert words[0] == "-m"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7,eth8" and environment["VLLM_X"] == "two words; $PATH"
    assert "TEACHER_IP" not in environment


def test_training_gets_the_paths_of_the_caller(tmp_path: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / NAME_WITH_SYNTAX
    folder.mkdir()
    for name in ("train.jsonl", "val.jsonl", "student", "keys"):
        (folder / name).touch()
    variables = {"TRAIN_FILES": "train.jsonl", "STUDENT": "student", "AUTH_DIR": "keys", "OUTPUT_DIR": "new run"}
    words, environment = submit(
        "run_qwen2.5_ray_cluster.sh",
        f"data.val_files={folder.name}/val.jsonl",
        "trainer.test_freq=5",
        **{name: f"{folder.name}/{path}" for name, path in variables.items()},
    )
    assert words[:4] == ["-m", "recipe_gkd.main_gkd", "--config-name", "on_policy_distill_trainer"]
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    config = read_config(words[3], words[4:]).config
    assert config.data.train_files == [str(folder / "train.jsonl")]
    assert config.data.val_files == [str(folder / "val.jsonl")]
    assert config.actor_rollout_ref.model.path == str(folder / "student")
    assert config.actor_rollout_ref.teacher.auth_dir == str(folder / "keys")
    assert config.trainer.test_freq == 5


def test_relative_run_folder_that_does_not_exist_is_one_of_the_caller(
    tmp_path: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, _ = submit("run_qwen2.5_ray_cluster.sh", OUTPUT_DIR="runs/lr=1e-3")
    assert read_config(words[3], words[4:]).config.trainer.default_local_dir == f"{tmp_path}/runs/lr=1e-3"
    words, environment = submit(
        "run_qwen2.5_ray_cluster.sh", "trainer.default_local_dir=runs/2", STUDENT="Qwen/Qwen3-8B"
    )
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    config = read_config(words[3], words[4:]).config
    assert config.trainer.default_local_dir == f"{tmp_path}/runs/2"
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-8B", "a hub name is no path of the caller"


def test_teacher_gets_the_paths_of_the_caller(tmp_path: Path, submit: Submit) -> None:
    folder = tmp_path / NAME_WITH_SYNTAX
    folder.mkdir()
    (folder / "keys").mkdir()
    words, _ = submit("run_teacher_on_ray.sh", CKPT_PATH=folder.name, AUTH_DIR=f"{folder.name}/keys")
    assert words[words.index("--ckpt-path") + 1] == str(folder)
    assert words[words.index("--auth-dir") + 1] == str(folder / "keys")


@pytest.mark.parametrize(
    ("trusted", "auth_dir", "expected"),
    [
        ("", "/keys", ["--auth-dir", "/keys"]),
        ("1", "", ["--trusted-network"]),
        ("1", "/keys", ["--trusted-network", "--auth-dir", "/keys"]),  # launch.teacher_on_ray refuses both
    ],
)
def test_teacher_job_gets_keys_or_trusted_network(
    trusted: str, auth_dir: str, expected: list[str], submit: Submit
) -> None:
    words, _ = submit("run_teacher_on_ray.sh", TRUSTED_NETWORK=trusted, AUTH_DIR=auth_dir)
    assert words[words.index("--tp-size") + 2 : words.index("--ckpt-path")] == expected
