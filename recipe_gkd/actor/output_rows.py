"""Logits only where there is a loss: the rest would be the largest tensors of a step, and no one reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor


@contextmanager
def only_rows(model: torch.nn.Module, rows_T: Tensor) -> Iterator[None]:
    """Inside, the output layer computes these rows of a packed row alone; nothing changes on other pipeline stages.

    With sequence parallelism the layer's input is divided by rows, so it is gathered first, and the layer is told that
    it is whole, in the way of Megatron's own last-token logits (models/gpt/gpt_model.py:668).
    """
    layer = getattr(unwrap_model(model), "output_layer", None)
    if layer is None:
        yield
        return
    divided = layer.sequence_parallel

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_N1D, *others = args
        if divided:
            # The layer itself sums the gradient over the ranks, of which each then keeps its own rows.
            hidden_N1D = gather_from_sequence_parallel_region(hidden_N1D, tensor_parallel_output_grad=False)
        return hidden_N1D[rows_T], *others

    hook = layer.register_forward_pre_hook(select)
    layer.sequence_parallel = False
    try:
        yield
    finally:
        layer.sequence_parallel = divided
        hook.remove()
