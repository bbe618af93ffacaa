"""A packed micro-batch on the device that trains on it."""

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

OVERLAP_ROWS = 8
"""Positions of a micro-batch at which the student's own top-k is looked for."""
AS_THEY_ARE = (
    "loss_rows_T", "logps_TK", "ids_TK", "response_ids_T", "sampling_logps_T", "teacher_logps_T",
    "has_teacher_T", "teacher_numbers_T", "is_reference_T", "advantages_T", "baselines_T", "scales_T",
)  # fmt: skip
"""Arrays of a packed batch that become tensors, under the same names."""


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A :class:`PackedBatch` as tensors, and what its tokens weigh."""

    token_ids_1N: Tensor
    position_ids_1N: Tensor
    row: PackedSequences
    loss_rows_T: Tensor
    logps_TK: Tensor
    ids_TK: Tensor
    response_ids_T: Tensor
    position_buckets_T: Tensor
    """int64: which of :data:`POSITION_BUCKETS` the token's position in its answer is in."""
    overlap_rows_R: Tensor
    """int64: some of the positions with a teacher's opinion, evenly spread."""
    sampling_logps_T: Tensor
    teacher_logps_T: Tensor
    has_teacher_T: Tensor
    teacher_numbers_T: Tensor
    is_reference_T: Tensor
    advantages_T: Tensor
    baselines_T: Tensor
    scales_T: Tensor
    weights: dict[str, Tensor]
    """[T], by component of the objective; see :mod:`~recipe_gkd.actor.loss_terms`."""


def to_device(packed: PackedBatch, weights: Mapping[str, np.ndarray], device: torch.device) -> DeviceBatch:
    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    bounds = torch.tensor([0, *packed.lengths]).cumsum(0).to(torch.int32).to(device)
    longest = max(packed.lengths)
    blocks = bucket_by_length(packed.lengths)
    row = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=[tensor(np.maximum(block, 0)) for block in blocks],
        unpack_index_N=tensor(_places(blocks)),
    )
    return DeviceBatch(
        token_ids_1N=tensor(packed.token_ids_N)[None],
        position_ids_1N=tensor(packed.position_ids_N)[None],
        row=row,
        position_buckets_T=tensor(np.searchsorted(POSITION_BUCKETS, packed.positions_T, side="right") - 1),
        overlap_rows_R=tensor(_evenly(np.flatnonzero(packed.has_teacher_T), OVERLAP_ROWS)),
        weights={name: tensor(weights_T) for name, weights_T in weights.items()},
        **{name: tensor(getattr(packed, name)) for name in AS_THEY_ARE},
    )


def _evenly(rows: np.ndarray, most: int) -> np.ndarray:
    return rows[:: max(1, -(-len(rows) // most))]


def _places(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """[N]: where each row of the packed row is in the blocks, flattened and one after the other."""
    rows = np.concatenate([block.ravel() for block in blocks])
    (real,) = np.nonzero(rows >= 0)
    unpack_index_N = np.empty(len(real), dtype=np.int64)
    unpack_index_N[rows[real]] = real
    return unpack_index_N
