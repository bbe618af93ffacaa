"""Rows of the embedding and of the output layer that belong to no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from recipe_gkd.actor.hf_names import EMBEDDING, OUTPUT


@contextmanager
def keep_padding_rows(
    chunks: Sequence[GPTModel], optimizer: MegatronOptimizer, tp_rank: int, n_tokens: int
) -> Iterator[None]:
    """Restore the padding rows, bit by bit, after the optimizer step inside of this context.

    They have no gradient, but AdamW's weight decay would shrink them.

    Args:
        n_tokens: Number of token ids. Rows from there on are padding.
    """
    rows = padding_rows(chunks, optimizer, tp_rank, n_tokens)
    kept = [tensor.clone() for tensor in rows]
    yield
    with torch.no_grad():
        for tensor, before in zip(rows, kept, strict=True):
            tensor.copy_(before)


def padding_rows(chunks: Sequence[GPTModel], optimizer: MegatronOptimizer, tp_rank: int, n_tokens: int) -> list[Tensor]:
    """Return views of this rank's padding rows: of its weights, and of its part of the optimizer's fp32 copies."""
    views = []
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if name not in (EMBEDDING, OUTPUT):
                continue
            first = max(0, n_tokens - tp_rank * len(weight))
            if first >= len(weight):
                continue
            views.append(weight.detach()[first:])
            copy = getattr(weight, "main_param", None)  # None: of fp32 weights there is none
            if copy is not None:
                start = _start_of_copy(weight, optimizer)
                views.append(copy.detach().view(-1)[max(0, first * weight[0].numel() - start) :])
    return views


def _start_of_copy(weight: torch.nn.Parameter, optimizer: MegatronOptimizer) -> int:
    """Return the index in the flat weight where this rank's fp32 copy starts: 0 unless the copy is divided."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and weight in part.model_param_gbuf_map:
            return int(part._get_model_param_range_map(weight)["param"].start)
    return 0
