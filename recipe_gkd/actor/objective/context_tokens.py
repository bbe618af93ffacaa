"""Whole responses on each context-parallel rank, for losses that combine the tokens of a response.

A context rank has the loss rows of its chunks; see :mod:`~recipe_gkd.actor.batch.context_parallel`. The student's
statistics of all rows are small compared with its activations, so that every rank can have all of them.

Shape suffixes: T response tokens of one context rank, U response tokens of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ContextTokens:
    """Exchange of values of response tokens among the context-parallel ranks.

    Usage::

        tokens = ContextTokens.of(sequence_T, positions_T, group)  # collective
        values_U = tokens.gather(values_T)                         # collective, with gradient
        loss_T = loss(values_U)[tokens.own_T]

    Attributes:
        group: Context-parallel group.
        counts: Number of response tokens of each rank.
        by_response_U: Index of each response token in the concatenation of the ranks' tokens, one response after the
            other, int64.
        own_T: Index of each of this rank's tokens among the micro-batch's tokens, int64.
    """

    group: ProcessGroup
    counts: list[int]
    by_response_U: Tensor
    own_T: Tensor

    @classmethod
    def of(cls, sequence_T: Tensor, positions_T: Tensor, group: ProcessGroup) -> ContextTokens:
        """Return the exchange for a micro-batch. Collective over ``group``.

        Args:
            sequence_T: Index of the token's response in the micro-batch, int64.
            positions_T: Position in the response, int64.
            group: Context-parallel group.
        """
        count = torch.tensor([len(positions_T)], device=positions_T.device)
        by_rank = [torch.empty_like(count) for _ in range(group.size())]
        dist.all_gather(by_rank, count, group=group)
        counts = torch.cat(by_rank).tolist()
        places_U = _gather(torch.stack((sequence_T, positions_T), 1), counts, group)
        # Positions are below 2^31, so that one number orders by response, then by position.
        by_response_U = (places_U[:, 0] * 2**31 + places_U[:, 1]).argsort()
        start = sum(counts[: group.rank()])
        own_T = by_response_U.argsort()[start : start + len(positions_T)]
        return cls(group=group, counts=counts, by_response_U=by_response_U, own_T=own_T)

    def gather(self, values_T: Tensor) -> Tensor:
        """Return the values of all response tokens, one response after the other, [U, ...]. Collective.

        The gradient of a value is the sum of its gradients on all ranks.

        Args:
            values_T: Values of this rank's tokens, [T, ...].
        """
        if values_T.dtype == torch.bool:  # not supported by all communication libraries
            return self.gather(values_T.to(torch.uint8)).bool()
        gathered: Tensor = _GatherTokens.apply(values_T, self.counts, self.group)
        return gathered.index_select(0, self.by_response_U)


class _GatherTokens(torch.autograd.Function):
    """Concatenation of the ranks' values."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _gather(values_T, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.counts)[ctx.group.rank()], None, None


def _gather(values_T: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """Return the concatenation of the ranks' values. They are padded to one length, because gloo requires it."""
    padded = values_T.new_zeros(max(counts), *values_T.shape[1:])
    padded[: len(values_T)] = values_T
    by_rank = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(by_rank, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(by_rank, counts, strict=True)])
