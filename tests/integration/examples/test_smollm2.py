"""The example of launch/example_smollm2.sh in miniature: real models, ten steps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

SMALL = (
    "trainer.total_training_steps=10",
    "trainer.test_freq=10",
    "data.train_batch_size=8",
    "data.val_max_samples=16",
    "data.max_response_length=32",
)


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE_S)
def test_pruned_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    environment = os.environ | {
        "EXAMPLE_DIR": str(tmp_path),
        "PROXY_FRONTEND_PORT": str(free_port()),
        "PROXY_BACKEND_PORT": str(free_port()),
    }
    command = ["bash", "launch/example_smollm2.sh", *SMALL]
    with subprocess.Popen(command, cwd=REPO, env=environment, stdout=PIPE, stderr=STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=2 * PATIENCE_S)
        finally:
            process.terminate()  # the script ends its teacher and the training
    assert process.returncode == 0, output[-6000:]
    models = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert models["teacher"]["answers"]["What is the capital of France?"] == "The capital of France is Paris."
    figures = json.loads((tmp_path / "results/comparison.json").read_text(encoding="utf-8"))["figures"]
    assert figures["after"]["kl"] < figures["before"]["kl"]
    assert figures["teacher"]["capitals"] > figures["before"]["capitals"]
    assert figures["teacher"]["agreement"] > 0.95 > figures["before"]["agreement"]
    assert "answers that end" in output
    assert (tmp_path / "run/report.html").is_file()
