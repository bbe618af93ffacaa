"""Arguments of launch/quickstart.sh. No run is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe_gkd.config import load_config
from tests._support.base_config import REQUIRED
from tests._support.repository import REPO


def quickstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(REPO / "launch" / "quickstart.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((), "quickstart"),
        (("--config-name", "quickstart_simple"), "quickstart_simple"),
        (("--self",), "quickstart_self"),
        (("--family", "qwen3_moe"), "quickstart_qwen3_moe"),
        (("--family=qwen3_next",), "quickstart_qwen3_next"),
        (
            ("trainer.scheduler=sync", "--config-name=quickstart_simple.yaml"),
            "quickstart_simple,trainer.scheduler=sync",
        ),
    ],
)
def test_run_folder_is_named_by_configuration_and_keys(arguments: tuple[str, ...], name: str) -> None:
    assert quickstart("--run-folder", *arguments).stdout.rstrip().endswith(f"/runs/{name}")


def test_folder_of_the_caller_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUICKSTART_DIR", "mine")
    assert quickstart("--run-folder").stdout.rstrip() == f"{tmp_path}/mine/runs/quickstart"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--config-name", "on_policy_distill_simple"),
            "expected one of: quickstart quickstart_qwen3_moe quickstart_qwen3_next quickstart_self quickstart_simple",
        ),
        (("--config-name",), "needs a name"),
        (("--family",), "needs a name"),
        (("--family", "qwen9"), "got quickstart_qwen9, expected one of: quickstart quickstart_qwen3_moe"),
        (("trainer.experiment_name=mine",), "trainer.experiment_name is set by this script"),
        (("++trainer.default_local_dir=x",), "is set by this script"),
        (("trainer.save_freq=-1",), "trainer.save_freq=-1 writes no checkpoint, and this script evaluates the one"),
    ],
)
def test_refused_argument_is_named(arguments: tuple[str, ...], message: str) -> None:
    refused = quickstart("--run-folder", *arguments)
    assert refused.returncode == 2 and message in refused.stderr and not refused.stdout


def test_quickstart_simple_makes_the_choices_of_the_simple_mode() -> None:
    simple, quick = (load_config(name, REQUIRED) for name in ("on_policy_distill_simple", "quickstart_simple"))
    for config in (simple, quick):
        assert config.trainer.scheduler == "sync" and config.actor_rollout_ref.hybrid_engine
        assert config.actor_rollout_ref.actor.strategy == "fsdp"
        assert config.actor_rollout_ref.actor.offloaded_states == {"params", "optimizer"}
        assert config.actor_rollout_ref.actor.fsdp_config.gradient_checkpointing
        assert config.actor_rollout_ref.rollout.sleep_level == 2
    assert quick.trainer.total_training_steps == 250


@pytest.mark.parametrize(
    ("family", "dtype", "n_steps"), [("qwen3_moe", "float32", 250), ("qwen3_next", "bfloat16", 300)]
)
def test_students_of_other_families_are_trained_with_fsdp(family: str, dtype: str, n_steps: int) -> None:
    config = load_config(f"quickstart_{family}", ["data.train_files=a"])
    assert config.actor_rollout_ref.actor.strategy == "fsdp" and config.actor_rollout_ref.actor.dtype == "float32"
    assert config.actor_rollout_ref.rollout.dtype == dtype
    assert config.actor_rollout_ref.model.path.endswith(f"/{family}")
    assert config.trainer.total_training_steps == n_steps


def test_wrong_keys_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for name in ("launch", "config"):
        shutil.copytree(REPO / name, tmp_path / name)
    (tmp_path / "launch/setup.sh").write_text("[ $1 = --check ]")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\nPYTHONPATH={REPO} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    command = ["bash", str(tmp_path / "launch/quickstart.sh"), "trainer.schedular=sync", "gkd.betaa=1"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and not refused.stdout
    assert "did you mean trainer.scheduler?" in refused.stderr and "gkd.betaa" in refused.stderr
    assert not (tmp_path / "outputs").exists()
