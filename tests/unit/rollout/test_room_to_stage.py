"""Engines of one node share its memory: together their copies of an update take no more than half of what is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests.integration.rollout.small_models import config_for

GIB = 1 << 30


@pytest.mark.parametrize(("n_sharing", "free"), [(1, 2 * GIB), (3, 6 * GIB)])
def test_the_copies_of_all_engines_of_a_node_take_at_most_half_of_its_free_memory(
    monkeypatch: pytest.MonkeyPatch, n_sharing: int, free: int
) -> None:
    from recipe_gkd.rollout.vllm_weights import room_to_stage

    for available, has_room in ((free, True), (free - 1, False)):
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert room_to_stage(GIB, torch.device("cpu"), n_sharing) is has_room


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe_gkd.rollout.vllm_weights import room_to_stage

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    assert room_to_stage(GIB, torch.device("cuda", 0), 8)


@pytest.mark.parametrize(("device", "n_sharing"), [("cpu", 4), ("cuda", 1)])
def test_an_engine_is_told_how_many_share_its_memory(device: str, n_sharing: int) -> None:
    """Two engines of two tensor ranks each: on a CPU four processes receive the weights into one memory."""
    sizes = ["rollout.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    told: list[dict[str, Any]] = []

    class Engine:
        def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
            told.append(args[0])
            return [{"error": None, "dirty": False, "seconds": 0.0}]

    worker = RolloutWorker(config_for(Path("none"), *sizes), rank=0, device=device)
    worker._updates.receive(Engine(), 1, [], 1 << 20, None)  # type: ignore[arg-type]
    assert told[0]["n_sharing"] == n_sharing
