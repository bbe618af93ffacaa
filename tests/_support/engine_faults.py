"""Faults of a rollout engine that no checksum of a weight sync detects. Each returns a function that removes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._support.rollout_models import make_padded_model
from tests._support.waiting import PATIENCE_S

OLD = 1
"""Seed of the weights before a sync."""
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
        from recipe_gkd.rollout.vllm.reload import ModelReload

        load = ModelReload.load
        ModelReload.load = lambda self, tensors: load(self, change(list(tensors)))  # type: ignore[method-assign]
        return lambda: setattr(ModelReload, "load", load)

    return plant


def keep_old_output_layer(_: Any) -> Callable[[], None]:
    """Do not pack the tied output layer again."""
    from recipe_gkd.rollout.vllm import reload as vllm_reload

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

    cache = worker._engine.run(change).result(timeout=PATIENCE_S)
    return lambda: worker._engine.run(lambda engine: rotary(engine).cos_sin_cache.copy_(cache)).result(
        timeout=PATIENCE_S
    )


FAULTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "stale output layer": keep_old_output_layer,
    "one layer not loaded": tamper_with_load(keep_old_layer),
    "other RoPE scaling": scale_rope,
    "other dtype": tamper_with_load(round_to_bfloat16),
    "swapped heads": tamper_with_load(swap_query_heads),
}
