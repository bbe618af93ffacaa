"""Logits only where there is a loss: the rest would be the largest tensors of a step, and no one reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor


@dataclass
class LogitRows:
    """What the model's output layer did in the body of :func:`select_logit_rows`."""

    weight_WD: Tensor | None = None
    """The layer's weights, if it was passed over: the model's output are hidden states then."""


@contextmanager
def select_logit_rows(model: torch.nn.Module, rows_T: Tensor, *, skip_lm_head: bool = False) -> Iterator[LogitRows]:
    """Inside, the output layer computes these rows of a packed row alone; nothing changes on other pipeline stages.

    ``skip_lm_head``: it computes nothing, and the model returns the hidden states of these rows: whoever multiplies them
    with the weights sums their gradient over the tensor-parallel ranks.
    With sequence parallelism the layer's input is divided by rows, so it is gathered first, and the layer is told that
    it is whole, in the way of Megatron's own last-token logits (models/gpt/gpt_model.py:668).
    """
    done = LogitRows()
    layer = getattr(unwrap_model(model), "output_layer", None)
    if layer is None:
        yield done
        return
    divided = layer.sequence_parallel

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_N1D, *others = args
        if divided:
            # The layer itself sums the gradient over the ranks, of which each then keeps its own rows.
            hidden_N1D = gather_from_sequence_parallel_region(hidden_N1D, tensor_parallel_output_grad=False)
        return hidden_N1D[rows_T], *others

    def keep(hidden_T1D: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        done.weight_WD = layer.weight if weight is None else weight
        return hidden_T1D, None

    hook = layer.register_forward_pre_hook(select)
    layer.sequence_parallel = False
    if skip_lm_head:
        layer.forward = keep
    try:
        yield done
    finally:
        layer.__dict__.pop("forward", None)
        layer.sequence_parallel = divided
        hook.remove()
