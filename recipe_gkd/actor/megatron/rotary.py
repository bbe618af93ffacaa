"""Rotary position embedding of packed rows without host synchronization (Su et al. 2021, RoFormer, arXiv:2104.09864).

Without Transformer Engine, Megatron copies the sequence boundaries to the host and cuts a table of angles for each
sequence, for queries and keys of each layer (models/common/embeddings/rope_utils.py ``_apply_rotary_pos_emb_thd``).
Here the cosines and sines of all rows are gathered by position once per forward pass of a model chunk, and all layers
share them. The results are equal bit by bit. On a GPU, one Triton kernel rotates all heads of a row, where PyTorch
starts seven.

Usage::

    chunk.rotary_pos_emb = PackedRotaryEmbedding(chunk.rotary_pos_emb, dtype)
    patches.install()  # lets the attention layers call `rotate`

Shape suffixes: N tokens of a packed row, S positions in the table, H heads, D head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recipe_gkd.losses.autograd_context import SavedTensors
from recipe_gkd.losses.kernel_backend import runs_triton

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from recipe_gkd.actor.megatron.packed_attention import PackedSequences


class PackedRotaryEmbedding(torch.nn.Module):
    """Replacement of ``GPTModel.rotary_pos_emb`` that returns the cosines and sines of each row.

    Args:
        embedding: Megatron's module, which computes the angles: base and llama3 scaling.
        dtype: Data type of queries and keys.
    """

    def __init__(self, embedding: RotaryEmbedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding, self.dtype = embedding, dtype
        self._table_S2D: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> PackedSequences:
        """Return the packed sequences, which ``GPTModel`` passes to :meth:`forward` unchanged."""
        packed: PackedSequences = args[-1]
        return packed

    def forward(self, packed: PackedSequences, **_: object) -> Tensor:
        """Return cosine and sine of each row's angles, [N, 1, 2, D]."""
        assert packed.row is not None
        return self._table(packed.row.max_length).index_select(0, packed.row.position_ids_N).unsqueeze(1)

    def _table(self, length: int) -> Tensor:
        """Return cosines and sines of at least ``length`` positions, [S, 2, D]."""
        if self._table_S2D is None or len(self._table_S2D) < length:
            n_positions = 1 << (length - 1).bit_length()  # a power of 2, so that it is seldom computed again
            angles_SD = self.embedding.get_emb(n_positions)[:, 0, 0]
            self._table_S2D = torch.stack((angles_SD.cos(), angles_SD.sin()), dim=1).to(self.dtype)
        return self._table_S2D


def is_gathered(table: Tensor) -> bool:
    """Return True for a result of :class:`PackedRotaryEmbedding`, False for Megatron's angles [S, 1, 1, D]."""
    return table.dim() == 4 and table.size(2) == 2


def rotate(heads_NHD: Tensor, table_N12D: Tensor) -> Tensor:
    """Return queries or keys rotated by the angles of their positions, [N, H, D].

    Args:
        heads_NHD: Queries or keys.
        table_N12D: Result of :class:`PackedRotaryEmbedding`. Channels i and i + D / 2 form a pair.
    """
    if runs_triton(heads_NHD) and heads_NHD.dtype == table_N12D.dtype:
        rotated: Tensor = _TritonRotation.apply(heads_NHD, table_N12D)
        return rotated
    cos_N1D, sin_N1D = table_N12D.unbind(2)
    first, second = heads_NHD.chunk(2, dim=-1)
    return heads_NHD * cos_N1D + torch.cat((-second, first), dim=-1) * sin_N1D


class _TritonRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedTensors, heads_NHD: Tensor, table_N12D: Tensor) -> Tensor:
        ctx.save_for_backward(table_N12D)
        return _launch(heads_NHD, table_N12D, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient_NHD: Tensor) -> tuple[Tensor, None]:
        return _launch(gradient_NHD, ctx.saved_tensors[0], sign=-1), None  # the inverse of a rotation is its transpose


def _launch(heads_NHD: Tensor, table_N12D: Tensor, *, sign: int) -> Tensor:
    """Return the heads rotated by ``sign`` times the angles of their positions."""
    from recipe_gkd.actor.megatron import triton_kernels

    if heads_NHD.stride(2) != 1:
        heads_NHD = heads_NHD.contiguous()
    table_N12D = table_N12D.contiguous()
    n_rows, n_heads, width = heads_NHD.shape
    out_NHD = heads_NHD.new_empty(n_rows, n_heads, width)
    if not out_NHD.numel():
        return out_NHD
    n_pairs = width // 2
    blocks = {"HEADS": _power_of_2(n_heads), "PAIRS": _power_of_2(n_pairs)}
    with torch.cuda.device_of(heads_NHD):
        triton_kernels.rotate_heads[n_rows,](
            out_NHD, heads_NHD, table_N12D, heads_NHD.stride(0), heads_NHD.stride(1), n_heads, n_pairs, SIGN=sign,
            **blocks, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_NHD


def _power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not smaller."""
    return 1 << (number - 1).bit_length()
