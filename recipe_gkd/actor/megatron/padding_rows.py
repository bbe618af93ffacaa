"""Padding rows: rows of the embedding and of the output layer that belong to no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from recipe_gkd.actor.megatron.hf_names import EMBEDDING, OUTPUT
from recipe_gkd.actor.megatron.megatron_model import MegatronModel


@contextmanager
def keep_padding_rows(model: MegatronModel, n_token_ids: int) -> Iterator[None]:
    """Restore the padding rows exactly after the optimizer step inside of this context.

    They have no gradient, but AdamW's weight decay would shrink them.

    Args:
        model: Model whose optimizer makes a step.
        n_token_ids: Number of token ids. Rows from this index on are padding.
    """
    rows = padding_rows(model, n_token_ids)
    kept = [tensor.clone() for tensor in rows]
    yield
    with torch.no_grad():
        for tensor, before in zip(rows, kept, strict=True):
            tensor.copy_(before)


def padding_rows(model: MegatronModel, n_token_ids: int) -> list[Tensor]:
    """Return views of this rank's padding rows: of its weights, and of its part of the optimizer's float32 copies.

    Args:
        model: Model with its optimizer.
        n_token_ids: Number of token ids. Rows from this index on are padding.
    """
    views = []
    for chunk in model.chunks:
        for name, weight in chunk.named_parameters():
            if name not in (EMBEDDING, OUTPUT):
                continue
            first = max(0, n_token_ids - model.layout.tp_rank * len(weight))
            if first >= len(weight):
                continue
            views.append(weight.detach()[first:])
            copy = getattr(weight, "main_param", None)  # float32 weights have no copy
            if copy is not None:
                start = _copy_start(weight, model.optimizer)
                views.append(copy.detach().view(-1)[max(0, first * weight[0].numel() - start) :])
    return views


def _copy_start(weight: torch.nn.Parameter, optimizer: MegatronOptimizer) -> int:
    """Return the flat index in the weight at which this rank's float32 copy starts: 0 if the copy is not divided."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and weight in part.model_param_gbuf_map:
            return int(part._get_model_param_range_map(weight)["param"].start)
    return 0
