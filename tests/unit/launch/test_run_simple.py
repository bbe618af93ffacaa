"""launch/run_simple.sh: which GPUs train, which are the teacher's, and the configuration of the training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests._support.repository import REPO

VARIABLES = {"STUDENT": "/models/student", "TRAIN_FILES": "train.parquet"}
NAME_WITH_SYNTAX = r"lr=1e-3, é (it's \ new) $HOME ${trainer.nnodes}"
"""Name of a folder with characters that have a meaning for a shell, for Hydra, or for OmegaConf."""


def run(
    *arguments: str, script: str = "run_simple.sh", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script. PYTHON is a command that prints its arguments and the visible GPUs."""
    return subprocess.run(
        ["bash", str(REPO / "launch" / script), *arguments],
        env=os.environ | VARIABLES | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def printer(tmp_path: Path) -> str:
    """Return the path of a command in place of Python that prints its arguments and the visible GPUs."""
    file = tmp_path / "printer"
    file.write_text('#!/bin/sh\necho "$@"; echo "GPUs: $CUDA_VISIBLE_DEVICES"\n')
    file.chmod(0o755)
    return str(file)


def test_configuration_is_valid() -> None:
    shown = run("--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    assert "path: /models/student" in shown.stdout and "hybrid_engine: true" in shown.stdout


@pytest.mark.parametrize("script", ["run_simple.sh", "run_qwen2.5_one_node.sh"])
@pytest.mark.parametrize(
    ("teacher", "message"), [("/no/such/teacher", "does not exist"), ("no/teacher", "hf download")]
)
def test_missing_teacher_is_named(script: str, teacher: str, message: str) -> None:
    done = run(script=script, TEACHER=teacher, PYTHON=sys.executable)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: TEACHER={teacher}") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", ["run_simple.sh", pytest.param("run_qwen2.5_one_node.sh", marks=pytest.mark.slow)])
def test_paths_of_the_caller_reach_the_configuration(tmp_path: Path, script: str) -> None:
    """The script changes the directory, and Hydra's grammar has a meaning for most of these characters."""
    folder = tmp_path / NAME_WITH_SYNTAX
    folder.mkdir()
    for name in ("train.jsonl", "val.jsonl", "student"):
        (folder / name).touch()
    given = {"STUDENT": f"{folder.name}/student", "TRAIN_FILES": f"{folder.name}/train.jsonl"}
    shown = run(
        "--cfg", "job", f"data.val_files={folder.name}/val.jsonl", "trainer.test_freq=5", script=script, cwd=tmp_path,
        **given,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    found = OmegaConf.create(shown.stdout)
    assert found["actor_rollout_ref"]["model"]["path"] == str(folder / "student")
    assert found["data"]["train_files"] in (str(folder / "train.jsonl"), [str(folder / "train.jsonl")])
    assert found["data"]["val_files"] in (str(folder / "val.jsonl"), [str(folder / "val.jsonl")])
    assert found["trainer"]["test_freq"] == 5


@pytest.mark.parametrize(
    ("script", "config_path"),
    [
        ("run_simple.sh", ["--config-path=./conf"]),
        pytest.param("run_qwen2.5_one_node.sh", ["--config-path", "conf"], marks=pytest.mark.slow),
        pytest.param("run_qwen2.5_ray_cluster.sh", ["--config-path=./conf"], marks=pytest.mark.slow),
    ],
)
def test_only_paths_are_resolved(tmp_path: Path, script: str, config_path: list[str]) -> None:
    shutil.copytree(REPO / "config", tmp_path / "conf")
    for name in ("t.jsonl", "u.jsonl", "qwen2.5"):
        (tmp_path / name).touch()
    shown = run(
        "--cfg", "job", *config_path, "trainer.experiment_name=qwen2.5", "data.val_files=[./t.jsonl]",
        "trainer.default_local_dir=new/run", script=script, cwd=tmp_path,
        TRAIN_FILES="t.jsonl,u.jsonl", TEACHER_IP="h", AUTH_DIR="/keys", OUTPUT_DIR="/run",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    found = yaml.safe_load(shown.stdout)
    assert found["trainer"]["experiment_name"] == "qwen2.5"
    assert found["trainer"]["default_local_dir"] == f"{tmp_path}/new/run"
    assert found["data"]["val_files"] == [f"{tmp_path}/t.jsonl"]
    assert found["data"]["train_files"] == f"{tmp_path}/t.jsonl,{tmp_path}/u.jsonl"


def test_hub_names_and_lists_are_passed_on(tmp_path: Path) -> None:
    shown = run("--cfg", "job", STUDENT="Qwen/Qwen2.5-0.5B", TRAIN_FILES="[/a.parquet,/b.parquet]", cwd=tmp_path)
    found = yaml.safe_load(shown.stdout)
    assert found["actor_rollout_ref"]["model"]["path"] == "Qwen/Qwen2.5-0.5B"
    assert found["data"]["train_files"] == ["/a.parquet", "/b.parquet"]


@pytest.mark.parametrize(
    ("variables", "gpus", "options"),
    [
        ({}, "0,1,2,3", {"trainer.n_gpus_per_node=4"}),
        ({"TEACHER": "/t"}, "0,1,2", {"trainer.n_gpus_per_node=3"}),
        (
            {"TEACHER": "/t", "TEACHER_GPUS": "0,2"},
            "1,3",
            {"trainer.n_gpus_per_node=2"},
        ),
        (
            {"TEACHER": "/t", "SHARE_TEACHER_GPU": "1", "TP_SIZE": "2"},
            "0,1,2,3",
            {
                "trainer.n_gpus_per_node=4",
                "actor_rollout_ref.teacher.sleep_between_batches=true",
            },
        ),
        ({"CUDA_VISIBLE_DEVICES": "", "TEACHER": "/t"}, "", {"trainer.n_gpus_per_node=1"}),
    ],
)
def test_gpus_are_divided(variables: dict[str, str], gpus: str, options: set[str], printer: str) -> None:
    command, visible = run(
        "--cfg", PYTHON=printer, **({"CUDA_VISIBLE_DEVICES": "0,1,2,3"} | variables)
    ).stdout.splitlines()
    assert visible == f"GPUs: {gpus}"
    assert options <= set(command.split())


def test_one_gpu_for_the_teacher_alone_is_refused_with_a_remedy() -> None:
    refused = run(TEACHER="/t", CUDA_VISIBLE_DEVICES="0")
    assert refused.returncode == 2 and "SHARE_TEACHER_GPU=1" in refused.stderr


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 32768}, 3072),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({}, 3072),
    ],
)
def test_default_length_of_the_teacher_is_at_most_that_of_its_model(
    tmp_path: Path, config: dict[str, Any], length: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = (REPO / "launch" / "run_simple.sh").read_text()
    function = script[script.index("default_length() {") : script.index("start_teacher() {")]
    command = ["bash", "-c", f'{function}\ndefault_length "$1"', "-", str(tmp_path)]
    shown = subprocess.run(
        command, env=os.environ | {"python": sys.executable}, capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == str(length)
