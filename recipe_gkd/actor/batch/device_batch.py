"""A packed micro-batch as tensors on the training device.

Shape suffixes: N tokens of a packed row, T response tokens, K teacher top-k, R positions of the top-k overlap, X
layers and experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from recipe_gkd.actor.batch.staging import BOUNDARIES, StagedBatch
from recipe_gkd.actor.batch.token_fields import TokenFields
from recipe_gkd.actor.head_exchange import RowOrder
from recipe_gkd.actor.packed_row import PackedRow


@dataclass(frozen=True, kw_only=True)
class DeviceBatch(TokenFields[Tensor]):
    """A packed micro-batch as tensors, with the weights of its tokens. Indices are int64.

    Attributes:
        token_ids_1N: Token ids of the packed row, int64.
        position_ids_1N: Positions in their sequences, int64.
        row: Boundaries of the sequences, for the attention layers.
        logps_TK: Teacher's top-k log-probabilities, float32; see :class:`~recipe_gkd.actor.batch.packing.PackedBatch`.
        ids_TK: Teacher's top-k token ids, int64.
        position_buckets_T: Index in ``POSITION_BUCKETS`` of the token's position in its response, int64.
        overlap_rows_R: Evenly spaced tokens that a teacher scored, int64, at most ``MAX_OVERLAP_POSITIONS``.
        routed_experts_NX: Experts that the engine chose, int16 [N, layers, experts of a token]; None without replay.
        weights: Weight of each token in each loss term, [T] by name; see :mod:`~recipe_gkd.actor.objective.loss_terms`.
    """

    token_ids_1N: Tensor
    position_ids_1N: Tensor
    row: PackedRow
    logps_TK: Tensor
    ids_TK: Tensor
    position_buckets_T: Tensor
    overlap_rows_R: Tensor
    weights: dict[str, Tensor]
    routed_experts_NX: Tensor | None = None


def to_device(staged: StagedBatch, device: torch.device) -> DeviceBatch:
    """Copy a staged micro-batch to the training device, without waiting for a GPU.

    Args:
        staged: Micro-batch.
        device: Device of the tensors.
    """
    tensors = staged.copy_to(device)
    blocks = [tensor for name, tensor in tensors.items() if name.startswith("block/")]
    order = None
    if "by_rank_N" in tensors:
        order = RowOrder(by_rank_N=tensors["by_rank_N"], by_sequence_N=tensors["by_sequence_N"])
    row = PackedRow(
        boundaries=tensors[BOUNDARIES],
        max_length=staged.max_length,
        position_ids_N=tensors["position_ids_N"],
        uniform_length=staged.uniform_length,
        blocks=blocks,
        unpack_index_N=tensors.get("unpack_index_N"),
        row_order=order,
    )
    return DeviceBatch(
        token_ids_1N=tensors["token_ids_N"][None],
        position_ids_1N=tensors["position_ids_N"][None],
        row=row,
        weights={name.removeprefix("weight/"): each for name, each in tensors.items() if name.startswith("weight/")},
        **{field.name: tensors[field.name] for field in fields(DeviceBatch) if field.name in tensors},
    )
