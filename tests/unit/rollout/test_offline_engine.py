"""Environment of an engine without a training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipe_gkd.rollout.environment import worker_environment
from recipe_gkd.rollout.offline_engine import prepare_environment
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

RUN_COMMAND = """
import os
import sys

from recipe_gkd.__main__ import main


class Finder:
    def find_spec(name, *_):
        if name == "torch":
            print("torch is imported with", os.environ.get("TORCH_CPP_LOG_LEVEL"))


sys.meta_path.insert(0, Finder)
main(sys.argv[1:])
"""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def test_search_for_a_gpu_does_not_initialize_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that vLLM forks afterwards, for tensor parallelism, could not use a GPU."""
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key != NVML_CHECK})
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get(NVML_CHECK))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert not prepare_environment()
    assert seen == ["1"]
    assert worker_environment("cuda")[NVML_CHECK] == "1"


@pytest.mark.parametrize("command", [("evaluate", ".", "--data", "none.jsonl"), ("data", "inspect", "none.jsonl")])
def test_level_of_torch_logs_is_set_before_the_import(command: tuple[str, ...], tmp_path: Path) -> None:
    """Torch reads the level once. The commands fail here, after they have read the configuration."""
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", RUN_COMMAND, *command],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.stdout.splitlines()[0] == "torch is imported with ERROR", run.stderr
