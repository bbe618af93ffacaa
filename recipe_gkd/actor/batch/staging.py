"""Host side of the copy of a packed micro-batch to the device.

:func:`stage` runs in the thread that packs. For a GPU it writes all arrays into one block of pinned memory, which is
copied without blocking the calling thread. Indices are int32 and log-probabilities may be float16 on the way; the
device widens them. For a CPU the arrays themselves become tensors, widened by the thread.

Shape suffixes: N tokens of a packed row, T response tokens, R positions of the top-k overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.batch import token_fields
from recipe_gkd.actor.batch.context_parallel import gathered_rows
from recipe_gkd.actor.batch.packing import Allocate, PackedBatch, bucket_by_length
from recipe_gkd.actor.batch.position_buckets import POSITION_BUCKETS

MAX_OVERLAP_POSITIONS = 8
BOUNDARIES = "boundaries"
"""Name of the boundaries of the sequences, the only indices that the device needs as int32."""
PACKED_ARRAYS = ("token_ids_N", "position_ids_N", "logps_TK", "ids_TK", *token_fields.NAMES)
_WIDE = {torch.int32: torch.int64, torch.float16: torch.float32}
_ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """A packed micro-batch on the host, ready to be copied.

    Attributes:
        tensors: Tensors by name: ``PACKED_ARRAYS``, indices of the attention (``boundaries``; if its kernel reads them,
            also ``block/0``, ..., ``unpack_index_N``, and with context parallelism ``by_rank_N`` and
            ``by_sequence_N``), ``position_buckets_T``, ``overlap_rows_R``, ``weight/<loss term>``, and if samples have
            experts ``routed_experts_NX``.
        block: Pinned memory that contains all tensors, uint8; None for a CPU.
        max_length: Length of the longest sequence.
        uniform_length: Length of all sequences if they are equally long; else None.
        uids_T: Uid of each response token's sample, int64 [T], on the host.
    """

    tensors: Mapping[str, Tensor]
    block: Tensor | None
    max_length: int
    uniform_length: int | None
    uids_T: np.ndarray

    def copy_to(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors on a device, with int64 indices and float32 log-probabilities. It does not wait for a GPU.

        The memory may be released at once: torch's allocator of pinned memory records an event on the stream of the
        copy, and reuses the block only after it.
        """
        if self.block is None:
            return dict(self.tensors)  # widened already
        copied, start = self.block.to(device, non_blocking=True), self.block.data_ptr()
        tensors = {name: _view(copied, each.data_ptr() - start, each) for name, each in self.tensors.items()}
        return {
            name: each.to(_WIDE[each.dtype]) if each.dtype in _WIDE and name != BOUNDARIES else each
            for name, each in tensors.items()
        }


def stage(
    packed: PackedBatch,
    weights: Mapping[str, np.ndarray],
    device: torch.device,
    *,
    attention: AttentionKernel = AttentionKernel.SDPA_BLOCKS,
    allocate: Allocate = np.empty,
) -> StagedBatch:
    """Prepare the copy of a packed micro-batch to the training device.

    Args:
        packed: Micro-batch.
        weights: Weight of each token in each loss term, float32 [T] by name.
        attention: Attention kernel. Only the row indices that it reads are prepared.
        allocate: Allocates the widened arrays of a CPU.
    """
    arrays = {name: getattr(packed, name) for name in PACKED_ARRAYS} | _attention_indices(packed, attention)
    if packed.routed_experts_NX is not None:
        arrays["routed_experts_NX"] = packed.routed_experts_NX
    arrays["position_buckets_T"] = _position_buckets(packed.positions_T)
    arrays["overlap_rows_R"] = _evenly_spaced(np.flatnonzero(packed.has_teacher_T), MAX_OVERLAP_POSITIONS)
    arrays |= {f"weight/{name}": weights_T for name, weights_T in weights.items()}
    if device.type == "cuda":
        with torch.cuda.device(device):  # a thread starts on device 0
            block, tensors = _in_pinned_memory(arrays)
    else:
        block, tensors = None, {name: torch.from_numpy(_widened(name, each, allocate)) for name, each in arrays.items()}
    lengths = {*packed.lengths}
    return StagedBatch(
        tensors=tensors,
        block=block,
        max_length=max(lengths),
        uniform_length=packed.lengths[0] if len(lengths) == 1 else None,
        uids_T=packed.uids_T,
    )


def _in_pinned_memory(arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
    """Copy arrays into one pinned block; return it and a view of it for each array."""
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    tensors = {name: _view(block, offsets[name], torch.from_numpy(array)) for name, array in arrays.items()}
    for name, array in arrays.items():
        np.copyto(tensors[name].numpy(), array)  # numpy, because torch would start its own threads
    return block, tensors


def _view(block: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return the part of a block from a byte offset on, with the dtype and shape of another tensor."""
    return block[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _widened(name: str, array: np.ndarray, allocate: Allocate) -> np.ndarray:
    wide = {np.dtype(np.int32): np.int64, np.dtype(np.float16): np.float32}.get(array.dtype)
    if wide is None or name == BOUNDARIES:
        return array
    widened = allocate(array.shape, wide)
    np.copyto(widened, array)
    return widened


def _attention_indices(packed: PackedBatch, attention: AttentionKernel) -> dict[str, np.ndarray]:
    """Return the boundaries of the sequences and the rows that the attention gathers, int32."""
    indices = {BOUNDARIES: np.cumsum([0, *packed.lengths])}
    if attention.reads_blocks and len({*packed.lengths}) > 1:
        blocks = bucket_by_length(packed.lengths)
        indices |= {f"block/{number}": np.maximum(block, 0) for number, block in enumerate(blocks)}
        indices["unpack_index_N"] = _unpack_index(blocks)
    # Transformer Engine exchanges keys and values between the context ranks, the other kernels rows for heads.
    if attention is not AttentionKernel.TE_FUSED and (by_rank_N := gathered_rows(packed)) is not None:
        indices |= {"by_rank_N": by_rank_N, "by_sequence_N": by_rank_N.argsort()}
    return {name: index.astype(np.int32) for name, index in indices.items()}


def _unpack_index(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the index of each token of the packed row in the flattened, concatenated blocks, int64 [N]."""
    rows = np.concatenate([block.ravel() for block in blocks])
    (real,) = np.nonzero(rows >= 0)
    unpack_index_N = np.empty(len(real), dtype=np.int64)
    unpack_index_N[rows[real]] = real
    return unpack_index_N


def _position_buckets(positions_T: np.ndarray) -> np.ndarray:
    """Return the index in ``POSITION_BUCKETS`` of each position, int32 [T]."""
    starts = np.asarray(POSITION_BUCKETS, positions_T.dtype)
    return (np.searchsorted(starts, positions_T, side="right") - 1).astype(np.int32)


def _evenly_spaced(rows: np.ndarray, max_count: int) -> np.ndarray:
    return rows[:: max(1, -(-len(rows) // max_count))].astype(np.int32)
