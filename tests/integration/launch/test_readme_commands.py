"""The commands of the README, run one after the other on a CPU as a new user would, in few steps.

``launch/test.sh`` and the installation with CUDA are left out. Of the block for GPUs, paths, sizes and the device are
replaced.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S
from tests.unit.test_doc_commands import commands_of, split_variables

pytestmark = pytest.mark.slow

README = REPO / "README.md"
STEPS = 4
ON_CPU = [
    "trainer.device=cpu",
    f"trainer.total_training_steps={STEPS}",
    "ray_init.num_cpus=8",
    "data.max_prompt_length=16",
    "data.max_response_length=24",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32",
]


def run(*command: str, **variables: str) -> str:
    """Run a command in the repository, and return its output."""
    done = subprocess.run(
        command,
        cwd=REPO,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a quickstart of a few steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    ports = {f"PROXY_{name}_PORT": str(free_port()) for name in ("FRONTEND", "BACKEND")}
    steps = f"trainer.total_training_steps={STEPS}"
    assert ["bash", "launch/quickstart.sh"] in commands_of(README)
    output = run("bash", "launch/quickstart.sh", steps, QUICKSTART_DIR=str(folder), **ports)
    assert re.search(rf"training steps +{STEPS} ", output), output[-2000:]
    assert all(name in output for name in ("student before", "student after", "loss (forward_kl)", "trained student:"))
    return folder


@pytest.fixture(scope="module")
def checkpoint(quickstart: Path) -> Path:
    """The checkpoint of the quickstart."""
    [found] = quickstart.glob(f"runs/*/global_step_{STEPS}")
    return found


def command(name: str, *arguments: str) -> str:
    """Run a command that the README names."""
    assert f"python -m recipe_gkd {name}" in README.read_text() or f"`{name} " in README.read_text()
    return run(sys.executable, "-m", "recipe_gkd", *name.split(), *arguments)


def test_report_describes_the_quickstart(checkpoint: Path) -> None:
    assert "report.html" in command("report", str(checkpoint.parent))
    assert "actor/kl_loss" in (checkpoint.parent / "report.html").read_text()


def test_plan_and_inspect_describe_the_quickstart(quickstart: Path) -> None:
    data, model = quickstart / "data" / "train.parquet", quickstart / "student"
    keys = [f"data.train_files={data}", f"actor_rollout_ref.model.path={model}", *ON_CPU]
    assert "actor" in command("plan", *keys)
    assert "prompt tokens: min" in command("data inspect", str(data), keys[1])


def test_exported_checkpoint_is_evaluated(quickstart: Path, checkpoint: Path, tmp_path: Path) -> None:
    command("export", str(checkpoint), str(tmp_path / "hf"))
    reward = REPO / "recipe_gkd" / "quickstart" / "reward.py"
    data = str(quickstart / "data" / "held_out.parquet")
    keys = ["data.ground_truth_key=answer", "data.max_prompt_length=16", "data.max_response_length=40"]
    options = ["--data", data, "--reward", f"{reward}:compute_score", "--json", str(tmp_path / "scores.json")]
    output = command("evaluate", str(tmp_path / "hf"), *options, *keys)
    assert "mean reward, greedy" in output
    [model] = json.loads((tmp_path / "scores.json").read_text())["models"]
    assert 0 <= next(iter(model["scores"].values()))["mean"] <= 1


def test_config_prints_a_key() -> None:
    assert "trainer.scheduler" in run(sys.executable, "-m", "recipe_gkd.config", "trainer.scheduler")


def test_teacher_and_training_of_the_gpu_block_run_on_a_cpu(quickstart: Path, tmp_path: Path) -> None:
    replaced = {
        "/models/Qwen2.5-7B-Instruct": str(quickstart / "teacher"),
        "/models/Qwen2.5-1.5B": str(quickstart / "student"),
        "/data/train.parquet": str(quickstart / "data" / "train.parquet"),
        "N_LOGPROBS=256": "N_LOGPROBS=16",
        "N_WORKERS=2": "N_WORKERS=1",
    }
    port = free_port()
    environment = {
        "RUN_DIR": str(tmp_path / "service"),
        "PROXY_FRONTEND_PORT": str(port),
        "PROXY_BACKEND_PORT": str(free_port()),
        "DTYPE": "float32",
        "MAX_MODEL_LEN": "64",
    }
    training = [*ON_CPU, f"actor_rollout_ref.teacher.server_port={port}", f"trainer.default_local_dir={tmp_path}/run"]
    kept = ("teacher/start_server.sh", "python -m recipe_gkd.main_gkd", "teacher/stop_server.sh")
    commands = [words for words in commands_of(README) if any(name in " ".join(words) for name in kept)]
    assert len(commands) == len(kept)
    outputs = []
    try:
        for words in commands:
            words = [_replaced(word, replaced) for word in words if not word.startswith("CUDA_VISIBLE_DEVICES=")]
            n = len(split_variables(words)[0])
            variables, arguments = dict(word.split("=", 1) for word in words[:n]), words[n:]
            if arguments[0] == "python":
                arguments = [sys.executable, *arguments[1:], *training]
            outputs.append(run(*arguments, **(environment | variables)))
    finally:
        subprocess.run(["bash", "teacher/stop_server.sh"], cwd=REPO, env=os.environ | environment, timeout=PATIENCE_S)
    assert f"step {STEPS}/{STEPS}" in outputs[1]


def _replaced(word: str, values: dict[str, str]) -> str:
    for old, new in values.items():
        word = word.replace(old, new)
    return word
