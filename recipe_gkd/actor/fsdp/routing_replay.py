"""Replay of the engine's experts in mixtures of experts of transformers.

A router of transformers returns its logits, the weights of the chosen experts, and their ids. A forward hook replaces
weights and ids. Gradient checkpointing calls it again in the backward pass, within the same context.

Shape suffixes: N tokens of a packed row, V experts of a layer, X experts of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from recipe_gkd.actor.replayed_experts import ReplayedExperts

Weigh = Callable[[Tensor, Tensor, Any], Tensor]
"""Function that returns the weights of experts, [N, X], for the router's logits [N, V], ids [N, X] and its module."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def _softmax(logits_NV: Tensor, ids_NX: Tensor, router: Any) -> Tensor:
    weights_NX = logits_NV.float().softmax(-1).gather(1, ids_NX)
    if router.norm_topk_prob:
        weights_NX = weights_NX / weights_NX.sum(-1, keepdim=True)
    return weights_NX.to(logits_NV.dtype)


def _normalized_softmax(logits_NV: Tensor, ids_NX: Tensor, router: Any) -> Tensor:
    weights_NX = logits_NV.float().softmax(-1).gather(1, ids_NX)
    return weights_NX / weights_NX.sum(-1, keepdim=True)


def _scaled_softmax(logits_NV: Tensor, ids_NX: Tensor, router: Any) -> Tensor:
    return logits_NV.float().softmax(-1).gather(1, ids_NX) * router.routed_scaling_factor


def _softmax_of_chosen(logits_NV: Tensor, ids_NX: Tensor, router: Any) -> Tensor:
    return logits_NV.gather(1, ids_NX).softmax(-1)


def _normalized_sigmoid(logits_NV: Tensor, ids_NX: Tensor, router: Any) -> Tensor:
    weights_NX = logits_NV.float().sigmoid().gather(1, ids_NX)
    return weights_NX / weights_NX.sum(-1, keepdim=True)


def _sigmoid(logits_NV: Tensor, ids_NX: Tensor, router: Any) -> Tensor:
    weights_NX = logits_NV.sigmoid().gather(1, ids_NX)
    if router.norm_topk_prob:
        weights_NX = weights_NX / (weights_NX.sum(-1, keepdim=True) + 1e-20)
    return weights_NX * router.routed_scaling_factor


ROUTERS: dict[str, tuple[str, Weigh]] = {
    "qwen2_moe": ("gate", _softmax),
    "qwen3_moe": ("gate", _softmax),
    "olmoe": ("gate", _softmax),
    "mixtral": ("gate", _normalized_softmax),
    "ernie4_5_moe": ("gate", _normalized_softmax),
    "minimax_m2": ("gate", _normalized_sigmoid),
    "deepseek_v2": ("gate", _scaled_softmax),
    "deepseek_v3": ("gate", _sigmoid),
    "glm4_moe": ("gate", _sigmoid),
    "glm4_moe_lite": ("gate", _sigmoid),
    "gpt_oss": ("router", _softmax_of_chosen),
}
"""``model_type`` -> name of the router in its layer's feed-forward module, and the weights of its experts."""

# Not a context variable: with gradient checkpointing, autograd calls the routers in a separate thread.
_current: list[ReplayedExperts | None] = []


@contextmanager
def replaying(experts: ReplayedExperts | None) -> Iterator[None]:
    """Return the context of the forward and backward pass of a micro-batch. None: the routers choose."""
    _current.append(experts)
    try:
        yield
    finally:
        _current.pop()


def add_replay(module: Any) -> None:
    """Make the routers of a model use the experts of the context :func:`replaying`.

    Args:
        module: Model of a family in ``ROUTERS``.
    """
    name, weigh = ROUTERS[module.config.get_text_config().model_type]
    for path, router in module.named_modules():
        if path.endswith(f".mlp.{name}") and (found := _LAYER.search(path)):
            router.register_forward_hook(partial(_replay, int(found[1]), weigh))


def _replay(layer: int, weigh: Weigh, router: Any, args: Any, output: Any) -> Any:
    experts = _current[-1] if _current else None
    if experts is None:
        return output
    logits_NV, _, own_ids_NX = output
    ids_NX = experts.choose(layer, own_ids_NX)
    return logits_NV, weigh(logits_NV, ids_NX, router), ids_NX
