"""A packed row of sequences, and causal attention within each of them.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width, R sequences of a block, S
length of a block, P positions of all blocks with their padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.head_exchange import RowOrder


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Positions of the sequences in a packed row.

    Attributes:
        boundaries: Start of each sequence, and the end of the last, int32.
        max_length: Length of the longest sequence.
        position_ids_N: Position of each of this rank's rows in its sequence.
        uniform_length: Length of all sequences, if they are equally long and ``blocks`` are not needed; else None.
        blocks: Row indices of R sequences of similar length, int64 [R, S] each. Padding on the right has any index.
            Empty if :func:`attend_in_blocks` is not called, or is called with ``uniform_length``.
        unpack_index_N: Index of each row in the concatenation of the flattened blocks, int64 [N]; None without blocks.
        row_order: Order of the rows after an exchange among the context-parallel ranks; None if this rank has all rows.
    """

    boundaries: Tensor
    max_length: int
    position_ids_N: Tensor
    uniform_length: int | None = None
    blocks: Sequence[Tensor] = ()
    unpack_index_N: Tensor | None = None
    row_order: RowOrder | None = None


def attend(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedRow,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Return causal attention within whole sequences, [N, H, D].

    Args:
        kernel: ``VARLEN`` or ``SDPA_BLOCKS``.
        query: Queries, [N, H, D].
        key: Keys, [N, G, D].
        value: Values, [N, G, D], or with fewer channels.
        row: Positions of the sequences.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Number of last keys that a query attends to, its own included; None for all.
    """
    function = attend_varlen if kernel is AttentionKernel.VARLEN else attend_in_blocks
    return function(query, key, value, row, scale, window)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scale: float | None, window: int | None = None
) -> Tensor:
    """Return causal attention within whole sequences, [N, H, D], with one kernel for all of them.

    Args:
        query: Queries, [N, H, D], bfloat16 or float16.
        key: Keys, [N, G, D].
        value: Values, [N, G, D], or with fewer channels.
        row: Positions of the sequences.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Number of last keys that a query attends to, its own included; None for all.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo

    width = value.size(-1)
    if width < query.size(-1):  # the kernel needs values as wide as the queries
        value = F.pad(value, (0, query.size(-1) - width))
    options: dict[str, Any] = {"enable_gqa": query.size(1) != key.size(1)} if _has_gqa_option(varlen_attn) else {}
    output = varlen_attn(
        query,
        key,
        value,
        row.boundaries,
        row.boundaries,
        row.max_length,
        row.max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # causal
        **options,
    )
    assert isinstance(output, Tensor)  # not a pair, because no further result is requested
    return output[..., :width]


@cache
def _has_gqa_option(varlen_attn: Callable[..., Any]) -> bool:
    """Return True if grouped queries are an option. Until torch 2.11 they need none."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_FLOAT32_TOKENS = 384
"""Length up to which a CPU computes 16-bit attention in float32, as exact and up to three times as fast: the backward
pass of torch's 16-bit kernel is slow for short sequences."""


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scale: float | None, window: int | None = None
) -> Tensor:
    """Return causal attention within whole sequences, [N, H, D], on any device and in any type.

    Args:
        query: Queries, [N, H, D].
        key: Keys, [N, G, D].
        value: Values, [N, G, D], or with fewer channels.
        row: Positions of the sequences.
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Number of last keys that a query attends to, its own included; None for all.
    """
    is_masked = window is not None and window < row.max_length
    if (query.device.type == "cuda" or is_masked) and (copies := query.size(1) // key.size(1)) > 1:
        # With grouped queries in float32 or with a mask, torch would choose the kernel that stores all scores,
        # [R, H, S, S].
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)

    def attend(q_RSHD: Tensor, k_RSGD: Tensor, v_RSGD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_RSHD, k_RSGD, v_RSGD))
        if q.device.type == "cpu" and q.itemsize == 2 and q.size(2) <= _FLOAT32_TOKENS:
            q, k, v = q.float(), k.float(), v.float()
        mask_SS = window_mask(q.size(2), window, q.device) if is_masked else None
        # Attention is causal and padding is on the right, so padding does not affect real positions.
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_SS, is_causal=mask_SS is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).flatten(0, 1).to(query.dtype)

    return apply_to_blocks(attend, query, key, value, row)


def window_mask(length: int, window: int | None, device: torch.device, *, first: int = 0) -> Tensor:
    """Return True where a query attends to a key, bool [length - first, length].

    Args:
        length: Number of keys.
        window: Number of last keys that a query attends to, its own included; None for all.
        device: Device of the mask.
        first: Position of the first query.
    """
    keys = torch.arange(length, device=device)
    distance = keys[first:, None] - keys
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def apply_to_blocks(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, row: PackedRow
) -> Tensor:
    """Return the results of a causal attention function on the right-padded blocks of a row, [N, H, D].

    Args:
        function: Returns [R * S, H, D] for queries [R, S, H, D], keys [R, S, G, D] and values [R, S, G, D].
        query: Queries, [N, H, D].
        key: Keys, [N, G, D].
        value: Values, [N, G, D].
        row: Positions of the sequences, with ``blocks`` or ``uniform_length``.
    """
    if (length := row.uniform_length) is not None:
        return function(*(x.unflatten(0, (-1, length)) for x in (query, key, value)))  # views: nothing is gathered
    blocks, unpack_index_N = row.blocks, row.unpack_index_N
    rows_P = torch.cat([rows_RS.flatten() for rows_RS in blocks])
    sizes = [rows_RS.numel() for rows_RS in blocks]
    padded = [_Pad.apply(x, rows_P, unpack_index_N).split(sizes) for x in (query, key, value)]
    outputs = [
        function(*(x.unflatten(0, rows_RS.shape) for x in parts))
        for rows_RS, *parts in zip(blocks, *padded, strict=True)
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
