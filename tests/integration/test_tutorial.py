"""The commands of docs/tutorial.md for a CPU, from the data to the use of the exported student."""

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
RESPONSE = re.compile(r"(\d\+\d\+\d=\d\d;){3}\d{4}")
"""Format of a response, right or wrong."""


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [block for block in found if not any(text in block for text in OTHER)]


@pytest.mark.slow
def test_tutorial_on_a_cpu_trains_exports_and_uses_a_student(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    [configuration] = blocks("yaml")
    key = f"\n  teacher: {{server_port: {ports[0]}}}\n  rollout:\n"
    configuration = configuration.replace("\n  rollout:\n", key).replace(FOLDER, str(tmp_path))
    (tmp_path / "run.yaml").write_text(configuration, encoding="utf-8")
    *_, with_transformers, with_vllm = blocks("python")
    commands = [block.replace(FOLDER, str(tmp_path)) for block in blocks("bash")]
    (stop,) = (block for block in commands if "stop_server.sh" in block)
    try:
        for block in commands:
            run(["bash", "-euo", "pipefail", "-c", block], ports)
        for block in (with_transformers, with_vllm):
            script = tmp_path / "use.py"
            script.write_text(block.replace(FOLDER, str(tmp_path)), encoding="utf-8")
            assert RESPONSE.search(run([sys.executable, str(script)], ports))
    finally:
        subprocess.run(["bash", "-c", stop], cwd=REPO, check=False, timeout=PATIENCE_S)


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
        command, cwd=REPO, env={**os.environ, **variables}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert not done.returncode, f"{command[-1]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
