"""Choice of experts by softmax scores with a correction, as in ERNIE 4.5.

Megatron corrects sigmoid scores only. Of a router with softmax scores it applies the softmax to the logits of the
chosen experts, which is the normalized weight of each, and lets an object in the place of its ``RouterReplay`` choose
them (``moe_utils.py``, ``topk_routing_with_score_function``).

Shape suffixes: N tokens of this rank, V experts of a layer, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def add_corrections(chunks: Sequence[GPTModel]) -> None:
    """Give each router a correction of its softmax scores, float32 zeros [1, V], as the buffer ``expert_bias``."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                _add_correction(layer.mlp.router)


def _add_correction(router: TopKRouter) -> None:
    correction_1V = torch.zeros(1, router.config.num_moe_experts, dtype=torch.float32, device=router.weight.device)
    del router.expert_bias  # None
    router.register_buffer("expert_bias", correction_1V)
    router.router_replay = _CorrectedChoice(router)


class _CorrectedChoice:
    """Choice of the experts of one layer, in place of Megatron's ``RouterReplay``."""

    def __init__(self, router: TopKRouter) -> None:
        self._router = router

    def get_replay_topk(self, logits_NV: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """Return logits and ids of the experts of each token, [N, X] each."""
        scores_NV = logits_NV.softmax(dim=-1, dtype=torch.float32) + self._router.expert_bias
        ids_NX = scores_NV.topk(topk, dim=-1).indices
        return logits_NV.gather(1, ids_NX), ids_NX
