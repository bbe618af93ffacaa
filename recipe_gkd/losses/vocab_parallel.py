"""The student's distribution on K ids plus one tail, from logits that are divided over ranks by vocabulary.

Axis names: T positions, V vocabulary, W = V / tp columns of one rank, K support ids, B = K + 1 buckets, the tail last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

CHUNK_ELEMENTS = 1 << 26
"""Positions are taken in chunks whose float32 copy has about this many elements (256 MiB)."""


def bucket_log_masses(
    logits_TW: Tensor, ids_TK: Tensor, present_TK: Tensor, *, vocab_size: int, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Unnormalised log masses ``u_TB`` of the K support ids and of all other ids together, the same on every rank.

    ``u_TB[:, k]`` is the logit of ``ids_TK[:, k]``, or -inf where ``present_TK`` is False; ``u_TB[:, K]`` is the
    logsumexp over the ids below ``vocab_size`` that no present entry names, or -inf if there are none.
    ``u_TB.log_softmax(1)`` are therefore the student's log-probabilities of the buckets. The tail never comes from
    1 - sum(q), which has no correct digits left once the support holds nearly all of the mass.

    Rank r of ``tp_group`` holds the columns [r * W, (r + 1) * W) of the vocabulary; columns from ``vocab_size`` on are
    padding and belong to no distribution. The ids present in one row must be distinct and in [0, vocab_size).
    Computed in float32, or in float64 for float64 logits. Differentiable in the logits, with no collective in the
    backward pass and no buffer of the size of the logits but their gradient.
    """
    return _BucketLogMasses.apply(logits_TW, ids_TK, present_TK, vocab_size, tp_group)


class _BucketLogMasses(torch.autograd.Function):
    """With u_tail = logsumexp(l_i, i off the support): du_k/dl_i = [i = id_k], du_tail/dl_i = exp(l_i - u_tail)."""

    @staticmethod
    def forward(
        ctx: Any, logits_TW: Tensor, ids_TK: Tensor, present_TK: Tensor, vocab_size: int, tp_group: ProcessGroup | None
    ) -> Tensor:
        rows, width = logits_TW.shape
        start = 0 if tp_group is None else tp_group.rank() * width
        own_TK = present_TK & (ids_TK >= start) & (ids_TK < start + width)
        columns_TK = (ids_TK - start).where(own_TK, 0)
        dtype = torch.promote_types(logits_TW.dtype, torch.float32)

        u_support_TK = logits_TW.gather(1, columns_TK).to(dtype).where(own_TK, 0)
        u_tail_T = torch.empty(rows, dtype=dtype, device=logits_TW.device)
        for part in _chunks(rows, width):
            off_TW = _off_support(logits_TW[part], columns_TK[part], own_TK[part], vocab_size - start, dtype)
            u_tail_T[part] = off_TW.logsumexp(1)
        if tp_group is not None and rows:
            dist.all_reduce(u_support_TK, group=tp_group)  # one rank has each id, the others have added 0
            u_tail_T = _logsumexp_over_ranks(u_tail_T, tp_group)

        ctx.save_for_backward(logits_TW, columns_TK, own_TK, u_tail_T)
        ctx.real_columns = vocab_size - start
        u_support_TK = u_support_TK.where(present_TK, float("-inf"))
        return torch.cat([u_support_TK, u_tail_T[:, None]], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_TW, columns_TK, own_TK, u_tail_T = ctx.saved_tensors
        grad_support_TK, grad_tail_T = grads[0][:, :-1], grads[0][:, -1]
        u_tail_T = u_tail_T.where(u_tail_T > float("-inf"), 0)  # no tail: exp(-inf - 0) = 0, not nan
        grad_TW = torch.empty_like(logits_TW)
        for part in _chunks(*logits_TW.shape):
            off_TW = _off_support(logits_TW[part], columns_TK[part], own_TK[part], ctx.real_columns, u_tail_T.dtype)
            off_TW.sub_(u_tail_T[part, None]).exp_().mul_(grad_tail_T[part, None])
            # Entries of other ranks all point at column 0: they must add nothing there, and may not overwrite it.
            off_TW.scatter_add_(1, columns_TK[part], grad_support_TK[part].where(own_TK[part], 0))
            grad_TW[part] = off_TW
        return grad_TW, None, None, None, None


def _off_support(
    logits_TW: Tensor, columns_TK: Tensor, own_TK: Tensor, real_columns: int, dtype: torch.dtype
) -> Tensor:
    """A copy in ``dtype`` with -inf on this rank's support ids and in the padding of the vocabulary."""
    off_TW = logits_TW.to(dtype, copy=True)
    off_TW[:, max(real_columns, 0) :] = float("-inf")
    blank_TK = torch.full(columns_TK.shape, float("inf"), dtype=dtype, device=off_TW.device)
    return off_TW.scatter_reduce_(1, columns_TK, blank_TK.masked_fill_(own_TK, float("-inf")), "amin")


def _logsumexp_over_ranks(x_T: Tensor, group: ProcessGroup) -> Tensor:
    top_T = x_T.clone()
    dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
    safe_T = top_T.where(top_T > float("-inf"), 0)
    sum_T = (x_T - safe_T).exp()
    dist.all_reduce(sum_T, group=group)
    return safe_T + sum_T.log()


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]
