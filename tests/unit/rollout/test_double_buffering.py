"""Tests of the choice between double-buffered and in-place updates, which depends on free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.rollout.update_memory import update_memory
from recipe_gkd.rollout.update_outcome import UpdateOutcome
from recipe_gkd.weight_sync.stats import ReceivedUpdate
from tests._support.rollout_models import config_for

GIB = 1 << 30


@pytest.mark.parametrize(("n_sharing_host", "free"), [(1, 2 * GIB), (3, 6 * GIB)])
def test_fits_limit_is_half_of_free_memory(n_sharing_host: int, free: int) -> None:
    needed = update_memory([GIB // 2, GIB // 2], layer_bytes=0)
    assert needed.fits_double_buffered(free, n_sharing_host)
    assert not needed.fits_double_buffered(free - 1, n_sharing_host)


@pytest.mark.parametrize(("device", "n_sharing_host"), [("cpu", 4), ("cuda", 1)])
def test_receive_passes_number_of_processes_on_host(device: str, n_sharing_host: int) -> None:
    """Two engines of two tensor ranks each: on a CPU, four processes receive the weights into one memory."""
    sizes = ["rollout.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    calls: list[dict[str, Any]] = []

    class Engine:
        def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[UpdateOutcome]:
            calls.append(args[0])
            received = ReceivedUpdate(seconds=0.0, n_bytes=0, checksum="", double_buffered=True)
            return [UpdateOutcome(received=received)]

    worker = RolloutWorker(config_for(Path("none"), *sizes), rank=0, device=device)
    worker._updates.receive(Engine(), 1, [], 1 << 20, None)  # type: ignore[arg-type]
    assert calls[0]["n_sharing_host"] == n_sharing_host
