"""Tests of the choice between double-buffered and in-place updates, which depends on free memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.rollout_models import config_for

GIB = 1 << 30


@pytest.mark.parametrize(("n_sharing_host", "free"), [(1, 2 * GIB), (3, 6 * GIB)])
def test_fits_cpu_limit_is_half_of_free_memory(monkeypatch: pytest.MonkeyPatch, n_sharing_host: int, free: int) -> None:
    from recipe_gkd.rollout.vllm_weights import fits_double_buffered

    for available, fits in ((free, True), (free - 1, False)):
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert fits_double_buffered(GIB, torch.device("cpu"), n_sharing_host) is fits


def test_fits_cuda_ignores_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe_gkd.rollout.vllm_weights import fits_double_buffered

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    assert fits_double_buffered(GIB, torch.device("cuda", 0), 8)


@pytest.mark.parametrize(("device", "n_sharing_host"), [("cpu", 4), ("cuda", 1)])
def test_receive_passes_number_of_processes_on_host(device: str, n_sharing_host: int) -> None:
    """Two engines of two tensor ranks each: on a CPU, four processes receive the weights into one memory."""
    sizes = ["rollout.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    calls: list[dict[str, Any]] = []

    class Engine:
        def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
            calls.append(args[0])
            return [{"error": None, "has_mixed_weights": False, "seconds": 0.0}]

    worker = RolloutWorker(config_for(Path("none"), *sizes), rank=0, device=device)
    worker._updates.receive(Engine(), 1, [], 1 << 20, None)  # type: ignore[arg-type]
    assert calls[0]["n_sharing_host"] == n_sharing_host
