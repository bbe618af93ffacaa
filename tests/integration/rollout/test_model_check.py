"""Faults of an engine that no checksum of a weight sync detects, and the comparison that detects them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.hybrid.sync_probe import SyncProbe, probe_contexts
from recipe_gkd.weight_sync.model_check import MISMATCH_BOUNDS, MismatchGuard
from recipe_gkd.workers import Workers
from tests._support.rollout_models import VOCABULARY, config_for, make_padded_model, prompts
from tests.integration.rollout.conftest import NEW, OLD, Pool

BOUND = MISMATCH_BOUNDS["float32"]
HEAD_WIDTH = 32

Tensors = list[tuple[str, torch.Tensor]]


def keep_old_layer(tensors: Tensors) -> Tensors:
    """Load the previous weights of one layer again, as if its update had been lost."""
    old = make_padded_model(OLD, tied=True).state_dict()
    return [(name, old[name] if name.startswith("model.layers.1.") else tensor) for name, tensor in tensors]


def round_to_bfloat16(tensors: Tensors) -> Tensors:
    return [(name, tensor.to(torch.bfloat16).to(tensor.dtype)) for name, tensor in tensors]


def swap_query_heads(tensors: Tensors) -> Tensors:
    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        first, second, *others = tensor.split(HEAD_WIDTH)
        return torch.cat([second, first, *others])

    return [(name, swapped(tensor) if ".q_proj." in name else tensor) for name, tensor in tensors]


def tamper_with_load(change: Callable[[Tensors], Tensors]) -> Callable[[Any], Callable[[], None]]:
    """Return a fault that changes the tensors of a sync before the engine loads them."""

    def plant(_: Any) -> Callable[[], None]:
        from recipe_gkd.rollout.vllm_reload import ModelReload

        load = ModelReload.load
        ModelReload.load = lambda self, tensors: load(self, change(list(tensors)))  # type: ignore[method-assign]
        return lambda: setattr(ModelReload, "load", load)

    return plant


def keep_old_output_layer(_: Any) -> Callable[[], None]:
    """Do not pack the tied output layer again."""
    from recipe_gkd.rollout import vllm_reload

    refresh = vllm_reload.refresh_tied_heads
    vllm_reload.refresh_tied_heads = lambda model: None  # type: ignore[assignment]
    return lambda: setattr(vllm_reload, "refresh_tied_heads", refresh)


def scale_rope(worker: Any) -> Callable[[], None]:
    """Halve all positions, as linear RoPE scaling with factor 2 does."""

    def rotary(engine: Any) -> Any:
        return engine.collective_rpc(lambda rank: rank.model_runner.model.model.layers[0].self_attn.rotary_emb)[0]

    def change(engine: Any) -> torch.Tensor:
        module = rotary(engine)
        cache = module.cos_sin_cache.clone()
        module.cos_sin_cache.copy_(cache[torch.arange(len(cache)) // 2])
        return cache

    cache = worker._engine.run(change).result(timeout=20)
    return lambda: worker._engine.run(lambda engine: rotary(engine).cos_sin_cache.copy_(cache)).result(timeout=20)


FAULTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "stale output layer": keep_old_output_layer,
    "one layer not loaded": tamper_with_load(keep_old_layer),
    "other RoPE scaling": scale_rope,
    "other dtype": tamper_with_load(round_to_bfloat16),
    "swapped heads": tamper_with_load(swap_query_heads),
}


@contextmanager
def planted(pool: Pool, rank: int, fault: Callable[[Any], Callable[[], None]]) -> Iterator[None]:
    """Plant a fault in a worker during the context."""

    def plant(worker: Any) -> None:
        worker.remove_fault = fault(worker)

    def remove(worker: Any) -> None:
        worker.remove_fault()

    ray.get(pool.handles[rank].__ray_call__.remote(plant), timeout=30)
    try:
        yield
    finally:
        ray.get(pool.handles[rank].__ray_call__.remote(remove), timeout=30)


def probe_of(pool: Pool, *ranks: int) -> SyncProbe:
    workers = cast(Workers, SimpleNamespace(actors=pool.actor, rollouts=pool.group(*ranks)))
    config = config_for(cast(Any, "unused"))
    contexts = probe_contexts([prompt.ids for prompt in prompts(20)], config)
    assert len(contexts[-1]) == 32 + 48 - 4 and all(ids.max() < VOCABULARY for ids in contexts)
    return SyncProbe(config, workers, contexts)


def sync(pool: Pool, seed: int, *ranks: int) -> None:
    pool.call_actor("set_weights", seed, True)
    asyncio.run(pool.sync(*ranks).sync(1))


def measure(pool: Pool, *ranks: int) -> dict[str, float]:
    return asyncio.run(probe_of(pool, *ranks).measure(1))


def test_probe_healthy_engines_agree_with_the_actor(pool: Pool) -> None:
    sync(pool, OLD, 0, 1)
    sync(pool, NEW, 0, 1)
    differences = measure(pool, 0, 1)
    assert list(differences) == ["rollout worker 0 of 2", "rollout worker 1 of 2"]
    assert all(0 < difference < BOUND / 100 for difference in differences.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_probe_planted_fault_is_caught_at_the_first_sync(pool: Pool, fault: str) -> None:
    rank = 1 if FAULTS[fault] is keep_old_output_layer else 0  # the folder of worker 1 stores the tied output layer
    sync(pool, OLD, rank)
    with planted(pool, rank, FAULTS[fault]):
        sync(pool, NEW, rank)
        differences = measure(pool, rank)
    with pytest.raises(WeightSyncError, match=r"another model than the actor.*rollout worker 0"):
        MismatchGuard(BOUND, 1, {"float32"}).observe(1, differences)


def test_probe_failed_engine_is_left_out(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    sync(pool, OLD, 0)

    def invalidate(worker: Any, reason: str | None) -> None:
        worker._updates.invalid_because = reason

    ray.get(pool.handles[0].__ray_call__.remote(invalidate, "this test needs it"), timeout=30)
    try:
        assert measure(pool, 0) == {}
    finally:
        ray.get(pool.handles[0].__ray_call__.remote(invalidate, None), timeout=30)
    assert "was not compared with the actor" in caplog.text and "this test needs it" in caplog.text
