"""Form in which a model of transformers gets the sequences of a micro-batch.

Shape suffixes: N tokens of a packed row, R sequences, S length of the longest one, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.actor.batch.device_batch import DeviceBatch


class RowStyle(Enum):
    """Form of a micro-batch. The value is its description in the log."""

    PACKED = "packed in one row"
    PADDED = "padded on the right"


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Arguments of a model for one micro-batch.

    Attributes:
        inputs: Keyword arguments of ``forward``.
        rows_T: Index of each row with a loss in the flattened positions of the output, int64.
    """

    inputs: dict[str, Any]
    rows_T: Tensor


def model_input(batch: DeviceBatch, style: RowStyle) -> ModelInput:
    """Return the arguments of a model for a micro-batch, without waiting for a GPU.

    Args:
        batch: Micro-batch on the training device.
        style: Result of :func:`~recipe_gkd.actor.fsdp.style_check.choose_style`.
    """
    if style is RowStyle.PACKED:
        inputs = packed_arguments(batch.token_ids_1N, batch.position_ids_1N)
        return ModelInput(inputs=inputs, rows_T=batch.loss_rows_T)
    bounds, length = batch.row.boundaries.long(), batch.row.max_length
    starts_R = bounds[:-1]
    rows_RS = starts_R[:, None] + torch.arange(length, device=bounds.device)
    is_real_RS = rows_RS < bounds[1:, None]
    token_ids_N = batch.token_ids_1N[0]
    ids_RS = torch.where(is_real_RS, token_ids_N[rows_RS.clamp(max=len(token_ids_N) - 1)], 0)
    sequences_T = torch.searchsorted(bounds, batch.loss_rows_T, right=True) - 1
    rows_T = sequences_T * length + batch.loss_rows_T - starts_R[sequences_T]
    return ModelInput(inputs=padded_arguments(ids_RS), rows_T=rows_T)


def packed_arguments(token_ids_1N: Tensor, position_ids_1N: Tensor) -> dict[str, Any]:
    """Return the arguments of a model for one packed row."""
    return {"input_ids": token_ids_1N, "position_ids": position_ids_1N, "use_cache": False}


def padded_arguments(token_ids_RS: Tensor) -> dict[str, Any]:
    """Return the arguments of a model for sequences that start at the left.

    There is no attention mask: a causal model does not attend to padding on the right, and without a mask it can use
    fused kernels. Positions count from 0 in every model that gets none.
    """
    return {"input_ids": token_ids_RS, "use_cache": False}
