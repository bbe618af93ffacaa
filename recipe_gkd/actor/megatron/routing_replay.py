"""Replay of the engine's experts in the routers of Megatron-core.

Megatron's own ``RouterReplay`` keeps the ids of micro-batches in a queue, and replaces the choice for all tokens or
none. This object takes its place in the router (``moe_utils.py``, ``topk_routing_with_score_function``). It gets the
experts of the micro-batch with the layer's packed sequences, which a recomputation passes again.

Shape suffixes: N tokens of this rank, V experts of a layer, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from recipe_gkd.actor.replayed_experts import ReplayedExperts


def add_replay(chunks: Sequence[GPTModel]) -> None:
    """Make the routers of a model use the experts of its packed sequences."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                router = layer.mlp.router
                replay = router.router_replay = _RouterReplay(layer.layer_number - 1, router.router_replay)
                layer.register_forward_pre_hook(replay.before_layer, with_kwargs=True)


class _RouterReplay:
    """Choice of the experts of one layer, in place of Megatron's ``RouterReplay``, or of another object there."""

    def __init__(self, layer: int, own: Any) -> None:
        self._layer, self._own = layer, own
        self._experts: ReplayedExperts | None = None

    def before_layer(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Set the experts of the micro-batch that the layer is about to compute."""
        self._experts = kwargs["packed_seq_params"].experts

    def get_replay_topk(
        self,
        scores_NV: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids of the experts of each token, [N, X] each."""
        arguments = scores_NV, topk, num_groups, group_topk
        if self._own is None:
            own_scores_NX, own_ids_NX = default_compute_topk(*arguments)
        else:
            own_scores_NX, own_ids_NX = self._own.get_replay_topk(*arguments, default_compute_topk)
        if self._experts is None:
            return own_scores_NX, own_ids_NX
        ids_NX = self._experts.choose(self._layer, own_ids_NX)
        return scores_NV.gather(1, ids_NX), ids_NX
