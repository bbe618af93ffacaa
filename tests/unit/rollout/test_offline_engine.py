"""Environment of an engine without a training."""

from __future__ import annotations

import os

import pytest
import torch

from recipe_gkd.rollout.environment import worker_environment
from recipe_gkd.rollout.offline_engine import prepare_environment

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
