"""The commands of docs/tutorial.md for a CPU, from the models to the use of the exported student."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

PAGE = REPO / "docs/tutorial.md"
FOLDER = "outputs/tutorial"
OTHER = ("launch/setup.sh", "/models/Qwen")
"""Texts of the blocks that are not run: the set-up, and the variant for GPUs."""
SHORTER = {
    "total_training_steps: 40": "total_training_steps: 4",
    "test_freq: 20": "test_freq: 4",
    "save_freq: 20": "save_freq: 4",
    "train_batch_size: 16": "train_batch_size: 8",
    "val_max_samples: 32": "val_max_samples: 8",
}
"""Values of the configuration that this test replaces to save time."""
QUESTION = "What is the capital of France?"
"""Input of the commands that read questions."""


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [block for block in found if not any(text in block for text in OTHER)]


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE_S)
def test_tutorial_on_a_cpu_trains_exports_and_uses_a_student(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    [configuration] = blocks("yaml")
    key = f"\n  teacher: {{server_port: {ports[0]}}}\n  rollout:\n"
    for text, other in {**SHORTER, "\n  rollout:\n": key, FOLDER: str(tmp_path)}.items():
        assert text in configuration
        configuration = configuration.replace(text, other)
    (tmp_path / "run.yaml").write_text(configuration, encoding="utf-8")
    commands = [block.replace(FOLDER, str(tmp_path)) for block in blocks("bash")]
    (stop,) = (block for block in commands if "stop_server.sh" in block)
    printed = {}
    try:
        for block in commands:
            printed[block] = run(["bash", "-euo", "pipefail", "-c", block], ports)
    finally:
        subprocess.run(["bash", "-c", stop], cwd=REPO, check=False, timeout=PATIENCE_S)
    [of_chat] = (text for block, text in printed.items() if " chat " in block)
    assert "The capital of France is Paris." in of_chat  # the teacher's answer
    data, *uses = (block.replace(FOLDER, str(tmp_path)) for block in blocks("python"))
    run([sys.executable, "-c", data], ports)
    assert (tmp_path / "my_prompts.jsonl").exists()
    answers = []
    for block in uses:
        script = tmp_path / "use.py"
        script.write_text(block, encoding="utf-8")
        answers.append(run([sys.executable, str(script)], ports).strip())
    of_transformers, of_vllm = answers
    assert of_transformers and of_transformers in of_vllm  # which also has vLLM's log


def run(command: list[str], ports: tuple[int, int]) -> str:
    """Run a command in the repository with this Python as ``python``. Return what it prints."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "PROXY_FRONTEND_PORT": str(ports[0]),
        "PROXY_BACKEND_PORT": str(ports[1]),
    }
    done = subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, **variables},
        input=QUESTION,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert not done.returncode, f"{command[-1]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
