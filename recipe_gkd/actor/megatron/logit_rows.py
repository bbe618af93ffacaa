"""Restriction of the output layer to the rows that have a loss, and its data type.

The logits of the other rows would be the largest tensors of a step, and they are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from recipe_gkd.losses.float32_head import float32_logits


@dataclass
class LogitRows:
    """Result of the forward pass inside of :func:`select_logit_rows`.

    Attributes:
        weight_WD: This rank's weights of the output layer, [W, D], if the layer was skipped and the model returned
            hidden states; None if the model returned logits.
    """

    weight_WD: Tensor | None = None


@contextmanager
def select_logit_rows(
    model: torch.nn.Module, rows_T: Tensor, *, skip_lm_head: bool = False, float32_head: bool = False
) -> Iterator[LogitRows]:
    """Make the output layer compute only the given rows of a packed batch, inside of this context.

    A pipeline stage without an output layer is not changed. With sequence parallelism the input of the layer is divided
    by rows. It is gathered first, and the layer is marked as not sequence parallel, as Megatron does for the logits of
    the last token (models/gpt/gpt_model.py ``_postprocess``).

    Args:
        model: Model chunk, wrapped or not.
        rows_T: Indices of the rows, [T].
        skip_lm_head: Skip the layer, so that the model returns the hidden states of these rows. The code that
            multiplies them with the weights must sum their gradient over the tensor-parallel ranks.
        float32_head: Compute float32 logits from 16-bit weights; see :mod:`~recipe_gkd.losses.float32_head`.
    """
    result = LogitRows()
    layer = getattr(unwrap_model(model), "output_layer", None)
    if layer is None:
        yield result
        return
    sequence_parallel = layer.sequence_parallel

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_N1D, *others = args
        if sequence_parallel:
            # The layer sums the gradient over the ranks itself. The backward pass here only keeps this rank's rows.
            hidden_N1D = gather_from_sequence_parallel_region(hidden_N1D, tensor_parallel_output_grad=False)
        return hidden_N1D[rows_T], *others

    def compute_float32(hidden_T1D: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        # As in ColumnParallelLinear, the gradient of the input is summed over the tensor-parallel ranks.
        hidden_TD = copy_to_tensor_model_parallel_region(hidden_T1D.squeeze(1))
        return float32_logits(hidden_TD, layer.weight if weight is None else weight).unsqueeze(1), None

    def skip(hidden_T1D: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        result.weight_WD = layer.weight if weight is None else weight
        return hidden_T1D, None

    hook = layer.register_forward_pre_hook(select)
    layer.sequence_parallel = False
    if skip_lm_head:
        layer.forward = skip
    elif float32_head:
        layer.forward = compute_float32
    try:
        yield result
    finally:
        layer.__dict__.pop("forward", None)
        layer.sequence_parallel = sequence_parallel
        hook.remove()
