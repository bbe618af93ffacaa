"""The model in training on one rank: a sharded model of transformers and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from recipe_gkd.actor.fsdp.packing import RowStyle
from recipe_gkd.actor.ranks import Layout


@dataclass(frozen=True, kw_only=True)
class FsdpModel:
    """One rank's part of the model in training.

    Attributes:
        module: The model, a ``PreTrainedModel`` in evaluation mode (no dropout) to which ``fully_shard`` was applied.
            Its parameters are float32 DTensors.
        layout: Coordinates of this rank.
        device: Device of the parameters and of the collectives.
        dtype: Data type of weights and activations in the forward and backward pass.
        mesh: Mesh of all ranks: ``shard``, or ``replicate`` x ``shard``.
        float32_head: True if the output layer computes float32 logits from 16-bit weights.
        style: How sequences of a micro-batch are given to the model.
        optimizer: Optimizer of all parameters.
    """

    module: Any
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh
    float32_head: bool
    style: RowStyle
    optimizer: torch.optim.AdamW
