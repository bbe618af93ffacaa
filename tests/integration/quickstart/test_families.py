"""Quickstarts with students of other families, in few steps: FSDP, weight syncs, checks of the engine, evaluation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from recipe_gkd.weight_sync.model_check import SYNC_METRIC, default_bound
from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

TIMEOUT_S = 3 * PATIENCE_S
STEPS, WARM_UP_STEPS = 60, 50


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("family", "dtype", "loss", "n_losses"),
    [("qwen3_moe", "float32", "actor/kl_loss", STEPS), ("qwen3_next", "bfloat16", "actor/sft_loss", WARM_UP_STEPS)],
)
def test_student_of_another_family_learns(family: str, dtype: str, loss: str, n_losses: int, tmp_path: Path) -> None:
    """The engine computes the student in each step, and the loss falls after its peak in the first steps."""
    ports = {f"PROXY_{name}_PORT": str(free_port()) for name in ("FRONTEND", "BACKEND")}
    keys: tuple[str, ...] = (f"trainer.total_training_steps={STEPS}", "trainer.startup_timeout_s=600")
    if n_losses == WARM_UP_STEPS:
        keys = (*keys, f"gkd.warmup_steps={WARM_UP_STEPS}")
    command = ["bash", "launch/quickstart.sh", "--family", family, *keys]
    variables = os.environ | {"QUICKSTART_DIR": str(tmp_path)} | ports
    with subprocess.Popen(command, cwd=REPO, env=variables, stdout=PIPE, stderr=STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.terminate()  # it ends what it has started
    assert process.returncode == 0, output[-6000:]
    report = json.loads((tmp_path / "report.json").read_text())
    accuracy = report["accuracy"]
    assert accuracy["teacher"] > 0.95 and 0.05 < accuracy["student_before"] < 0.5
    [file] = tmp_path.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    losses = [line[loss] for line in lines if loss in line]
    assert report["steps"] == STEPS and len(losses) == n_losses and losses[-1] < 0.7 * max(losses)
    differences = [line[SYNC_METRIC] for line in lines if SYNC_METRIC in line]
    assert differences and max(differences) < default_bound({dtype}, on_cpu=True)
