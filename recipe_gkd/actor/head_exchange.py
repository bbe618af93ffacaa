"""Exchange of rows for attention heads among context-parallel ranks, with an all-to-all.

Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509: each rank computes attention over the whole row for 1 / C of
the heads, where C is the number of ranks. Any attention over whole sequences can be used between the two exchanges.

Shape suffixes: N tokens of the whole padded row, M = N / C rows of one rank, H query heads, G key/value heads, D head
width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """Order of the rows after an exchange.

    Attributes:
        by_rank_N: Rows of the whole padded row in the order of the context ranks, int64.
        by_sequence_N: Inverse permutation: place of each row of the whole padded row in that order, int64.
    """

    by_rank_N: Tensor
    by_sequence_N: Tensor


def gather_rows(
    query: Tensor, key: Tensor, value: Tensor, order: RowOrder, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of all rows, in the order of the sequences. Collective over ``group``.

    If there are fewer key/value heads than ranks, each is sent to all ranks that have queries of it.

    Args:
        query: Queries of this rank's rows, [M, H, D].
        key: Keys, [M, G, D].
        value: Values, [M, G, D].
        group: Context-parallel group. Its size divides H, and it divides G or is a multiple of it.

    Returns:
        Queries [N, H / C, D], and keys and values [N, max(1, G / C), D].
    """
    size = group.size()
    if (copies := size // key.size(1)) > 1:
        key, value = (heads.repeat_interleave(copies, dim=1) for heads in (key, value))
    by_rank = [heads.unflatten(1, (size, -1)).transpose(0, 1) for heads in (query, key, value)]  # [C, M, heads, D]
    whole = _GatherRows.apply(torch.cat(by_rank, dim=2), order, group)
    query, key, value = whole.split([heads.size(2) for heads in by_rank], dim=1)
    return query, key, value


def scatter_rows(output: Tensor, order: RowOrder, group: ProcessGroup) -> Tensor:
    """Return all heads of this rank's rows, [M, H, D]. Collective over ``group``.

    Args:
        output: This rank's heads of all rows, in the order of the sequences, [N, H / C, D].
        group: Context-parallel group.
    """
    return _ScatterRows.apply(output, order, group).transpose(0, 1).flatten(1, 2)


class _Exchange(Protocol):
    """Context of the autograd functions."""

    order: RowOrder
    group: ProcessGroup


class _GatherRows(torch.autograd.Function):
    """Exchange, then reorder by sequence. The backward pass is a permutation, whereas ``x[rows]`` would need a sum."""

    @staticmethod
    def forward(ctx: _Exchange, parts: Tensor, order: RowOrder, group: ProcessGroup) -> Tensor:
        ctx.order, ctx.group = order, group
        return _gather(parts, order, group)

    @staticmethod
    def backward(ctx: _Exchange, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradient, ctx.order, ctx.group), None, None


class _ScatterRows(torch.autograd.Function):
    """Inverse of :class:`_GatherRows`."""

    @staticmethod
    def forward(ctx: _Exchange, whole: Tensor, order: RowOrder, group: ProcessGroup) -> Tensor:
        ctx.order, ctx.group = order, group
        return _scatter(whole, order, group)

    @staticmethod
    def backward(ctx: _Exchange, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.order, ctx.group), None, None


def _gather(parts: Tensor, order: RowOrder, group: ProcessGroup) -> Tensor:
    """Return all rows in the order of the sequences, [N, heads, D], of parts [C, M, heads, D] for each rank."""
    return _all_to_all(parts, group).flatten(0, 1)[order.by_sequence_N]


def _scatter(whole: Tensor, order: RowOrder, group: ProcessGroup) -> Tensor:
    """Return parts [C, M, heads, D] from each rank, of all rows in the order of the sequences, [N, heads, D]."""
    return _all_to_all(whole[order.by_rank_N].unflatten(0, (group.size(), -1)), group)


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
