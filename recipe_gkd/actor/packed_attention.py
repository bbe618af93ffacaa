"""Attention within the sequences of a packed row, without Transformer Engine.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width, R sequences of a block, S
length of a block, P positions of all blocks with their padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel, attention_kernel
from recipe_gkd.actor.head_exchange import RowOrder, gather_rows, scatter_rows


@dataclass
class PackedSequences(PackedSeqParams):
    """Positions of the sequences in a packed row.

    The inherited fields are read by Transformer Engine, the new fields by :class:`PackedAttention` and
    :class:`~recipe_gkd.actor.rotary.PackedRotaryEmbedding`.

    Attributes:
        position_ids_N: Position of each of this rank's rows in its sequence.
        uniform_length: Length of all sequences, if they are equally long and ``blocks`` are not needed; else None.
        blocks: Row indices of R sequences of similar length, int64 [R, S] each. Padding on the right has any index.
            Empty if :func:`attend_in_blocks` is not called, or is called with ``uniform_length``.
        unpack_index_N: Index of each row in the concatenation of the flattened blocks, int64 [N]; None without blocks.
        row_order: Order of the rows after an exchange among the context-parallel ranks; None if this rank has all rows.
    """

    position_ids_N: Tensor | None = None
    uniform_length: int | None = None
    blocks: list[Tensor] = field(default_factory=list)
    unpack_index_N: Tensor | None = None
    row_order: RowOrder | None = None


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row, with grouped queries, without dropout."""

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self._kernel = attention_kernel(config)
        self._cp_group: Any = None if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Return the attention output of this rank's rows, [N, H * D].

        Args:
            query: Queries, [N, H, D].
            key: Keys, [N, G, D].
            value: Values, [N, G, D].
            attention_mask: Unused.
            packed_seq_params: Positions of the sequences.
        """
        order = packed_seq_params.row_order
        if order is None:
            return self._attend(query, key, value, packed_seq_params).flatten(1)
        query, key, value = gather_rows(query, key, value, order, self._cp_group)
        output = self._attend(query, key, value, packed_seq_params)
        return scatter_rows(output, order, self._cp_group).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSequences) -> Tensor:
        """Return the attention output of whole sequences, [N, H, D]."""
        if self._kernel is AttentionKernel.VARLEN:
            return attend_varlen(query, key, value, packed_seq_params, self.scale)
        return attend_in_blocks(query, key, value, packed_seq_params, self.scale)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty state: the module has no parameters."""
        return {}


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSequences, scale: float | None
) -> Tensor:
    """Return causal attention within whole sequences, [N, H, D], with one kernel for all of them.

    Args:
        query: Queries, [N, H, D], bfloat16 or float16.
        key: Keys, [N, G, D].
        value: Values, [N, G, D].
        packed_seq_params: Positions of the sequences. Their boundaries are int32, as the kernel requires.
        scale: Factor of the scores; None for 1 / sqrt(D).
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo

    output = varlen_attn(
        query,
        key,
        value,
        packed_seq_params.cu_seqlens_q,
        packed_seq_params.cu_seqlens_kv,
        packed_seq_params.max_seqlen_q,
        packed_seq_params.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(output, Tensor)  # not a pair, because no further result is requested
    return output


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSequences, scale: float | None
) -> Tensor:
    """Return causal attention within whole sequences, [N, H, D], on any device and in any type.

    Args:
        query: Queries, [N, H, D].
        key: Keys, [N, G, D].
        value: Values, [N, G, D].
        packed_seq_params: Positions of the sequences.
        scale: Factor of the scores; None for 1 / sqrt(D).
    """
    if query.device.type == "cuda" and (copies := query.size(1) // key.size(1)) > 1:
        # With grouped queries in float32, torch would choose the kernel that stores all scores, [R, H, S, S].
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)

    def attend(q_RSHD: Tensor, k_RSGD: Tensor, v_RSGD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_RSHD, k_RSGD, v_RSGD))
        # Attention is causal and padding is on the right, so padding does not affect real positions.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1))
        return out.transpose(1, 2).flatten(0, 1)

    if (length := packed_seq_params.uniform_length) is not None:
        return attend(*(x.unflatten(0, (-1, length)) for x in (query, key, value)))  # views: nothing is gathered
    blocks, unpack_index_N = packed_seq_params.blocks, packed_seq_params.unpack_index_N
    rows_P = torch.cat([rows_RS.flatten() for rows_RS in blocks])
    sizes = [rows_RS.numel() for rows_RS in blocks]
    padded = [_Pad.apply(x, rows_P, unpack_index_N).split(sizes) for x in (query, key, value)]
    outputs = [
        attend(*(x.unflatten(0, rows_RS.shape) for x in parts)) for rows_RS, *parts in zip(blocks, *padded, strict=True)
    ]
    return _Unpad.apply(torch.cat(outputs), unpack_index_N)


class _Pad(torch.autograd.Function):
    """Gather of the rows of all blocks. The backward pass is a gather, not a sum at indices as of ``x[rows]``.

    Each row is in one block, and the gradient of padding is zero because attention is causal.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_P: Tensor, unpack_index_N: Tensor) -> Tensor:
        ctx.save_for_backward(unpack_index_N)
        return x[rows_P]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.saved_tensors[0]], None, None


class _Unpad(torch.autograd.Function):
    """Inverse of :class:`_Pad`, with a gradient of zero for padding."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, unpack_index_N: Tensor) -> Tensor:
        ctx.save_for_backward(unpack_index_N)
        ctx.n_padded = len(padded)
        return padded[unpack_index_N]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        padded = gradient.new_zeros(ctx.n_padded, *gradient.shape[1:])
        return padded.index_copy_(0, ctx.saved_tensors[0], gradient), None
