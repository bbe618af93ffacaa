"""A packed micro-batch as tensors on the training device.

Shape suffixes: N tokens of a packed row, T response tokens, K teacher top-k, R positions of the top-k overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe_gkd.actor.layer_spec import PackedSequences
from recipe_gkd.actor.loss_metrics import POSITION_BUCKETS
from recipe_gkd.actor.microbatch import PackedBatch, bucket_by_length

MAX_OVERLAP_POSITIONS = 8
COPIED_ARRAYS = (
    "loss_rows_T", "logps_TK", "ids_TK", "uids_T", "response_ids_T", "positions_T", "sampling_logps_T",
    "teacher_logps_T", "has_teacher_T", "teacher_numbers_T", "is_reference_T", "rewards_T", "advantages_T",
    "baselines_T", "scales_T",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A :class:`PackedBatch` as tensors, with the weights of its tokens.

    The attributes that are not listed are those of :class:`PackedBatch`.

    Attributes:
        token_ids_1N: Token ids of the packed row, int64.
        position_ids_1N: Positions in their sequences, int64.
        row: Boundaries of the sequences, for the attention layers.
        position_buckets_T: Index in ``POSITION_BUCKETS`` of the token's position in its response, int64.
        sequence_T: Index of the token's response in the micro-batch, int64.
        overlap_rows_R: Evenly spaced tokens that a teacher scored, int64, at most ``MAX_OVERLAP_POSITIONS``.
        weights: Weight of each token in each loss term, [T] by name; see :mod:`~recipe_gkd.actor.loss_terms`.
    """

    token_ids_1N: Tensor
    position_ids_1N: Tensor
    row: PackedSequences
    loss_rows_T: Tensor
    logps_TK: Tensor
    ids_TK: Tensor
    uids_T: Tensor
    response_ids_T: Tensor
    positions_T: Tensor
    position_buckets_T: Tensor
    sequence_T: Tensor
    overlap_rows_R: Tensor
    sampling_logps_T: Tensor
    teacher_logps_T: Tensor
    has_teacher_T: Tensor
    teacher_numbers_T: Tensor
    is_reference_T: Tensor
    rewards_T: Tensor
    advantages_T: Tensor
    baselines_T: Tensor
    scales_T: Tensor
    weights: dict[str, Tensor]


def to_device(packed: PackedBatch, weights: Mapping[str, np.ndarray], device: torch.device) -> DeviceBatch:
    """Copy a packed micro-batch to the training device.

    Args:
        packed: Micro-batch.
        weights: Weight of each token in each loss term, float32 [T] by name.
        device: Device of the tensors.
    """

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    boundaries = torch.tensor([0, *packed.lengths]).cumsum(0).to(torch.int32).to(device)
    longest = max(packed.lengths)
    blocks = bucket_by_length(packed.lengths)
    row = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=[tensor(np.maximum(block, 0)) for block in blocks],
        unpack_index_N=tensor(_unpack_index(blocks)),
    )
    return DeviceBatch(
        token_ids_1N=tensor(packed.token_ids_N)[None],
        position_ids_1N=tensor(packed.position_ids_N)[None],
        row=row,
        position_buckets_T=tensor(np.searchsorted(POSITION_BUCKETS, packed.positions_T, side="right") - 1),
        sequence_T=tensor(np.cumsum(packed.positions_T == 0) - 1),
        overlap_rows_R=tensor(_evenly_spaced(np.flatnonzero(packed.has_teacher_T), MAX_OVERLAP_POSITIONS)),
        weights={name: tensor(weights_T) for name, weights_T in weights.items()},
        **{name: tensor(getattr(packed, name)) for name in COPIED_ARRAYS},
    )


def _evenly_spaced(rows: np.ndarray, max_count: int) -> np.ndarray:
    return rows[:: max(1, -(-len(rows) // max_count))]


def _unpack_index(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the index of each token of the packed row in the flattened, concatenated blocks, int64 [N]."""
    rows = np.concatenate([block.ravel() for block in blocks])
    (real,) = np.nonzero(rows >= 0)
    unpack_index_N = np.empty(len(real), dtype=np.int64)
    unpack_index_N[rows[real]] = real
    return unpack_index_N
