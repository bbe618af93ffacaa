"""Read the student: what is asked, from logits that are divided over ranks by vocabulary.

One pass over the logits forward, one backward.

With top the largest logit off the support, x = (logit - top) / temperature, and u_tail = log(sum exp(x_i), i off the
support), all up to a constant of the row:

    d u_k / d l_i = [i = id_k] / temperature,    d u_tail / d l_i = exp(x_i - u_tail) / temperature   off the support

Logits are subtracted from each other before anything else, which loses no digit however large they are.
The backward pass needs no collective, and nothing of the logits' size but their gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from recipe_gkd.losses.kernel_backend import chunk_positions, select_backend
from recipe_gkd.losses.logits_query import Backward, LogitsQuery, SoftmaxSpec, StudentLogStats, heads_of, local_columns


def compute_log_stats(
    logits_TW: Tensor,
    query: LogitsQuery,
    *,
    tp_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    in_place: bool = False,
) -> StudentLogStats:
    """``logits_TW``: this rank's columns, any float dtype; rank r of ``tp_group`` has the columns [r W, (r + 1) W).

    ``chunk_tokens``: positions at a time; None: as many as suit the device.
    ``in_place``: the gradient is written over the logits, which nobody else may need after the forward pass; a second
    backward pass then ends with PyTorch's error about a tensor that was modified.
    """
    plan = Plan.make(query, logits_TW.shape[1], tp_group)
    parts = chunks(len(logits_TW), chunk_tokens or chunk_positions(logits_TW))
    return reading_of(query, *_LogStatsOfLogits.apply(logits_TW, plan, parts, in_place))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A question as one rank works on it."""

    softmaxes: list[SoftmaxSpec]
    picked_columns_T1: Tensor
    picked_own_T1: Tensor
    valid_TK: Tensor
    tp_group: ProcessGroup | None

    @classmethod
    def make(cls, query: LogitsQuery, width: int, tp_group: ProcessGroup | None) -> Plan:
        first_column = 0 if tp_group is None else tp_group.rank() * width
        picked_T1 = query.sampled_T[:, None]
        columns_T1, own_T1 = local_columns(picked_T1, torch.ones_like(picked_T1, dtype=torch.bool), first_column, width)
        return cls(
            softmaxes=heads_of(query, first_column, width),
            picked_columns_T1=columns_T1,
            picked_own_T1=own_T1,
            valid_TK=query.valid_TK,
            tp_group=tp_group,
        )

    def read(self, logits_CW: Tensor, part: slice) -> Tensor:
        """Return this rank's share of the support's logits, the picked logit and each head's tail: [C, K + 1 + 3 H]."""
        dtype = torch.promote_types(logits_CW.dtype, torch.float32)
        support, picked_own_C1 = self.softmaxes[0].rows(part), self.picked_own_T1[part]
        support_CK = logits_CW.gather(1, support.columns_TK).to(dtype)
        picked_C1 = logits_CW.gather(1, self.picked_columns_T1[part]).to(dtype)
        softmaxes = [support, *(head.rows(part) for head in self.softmaxes[1:])]
        tails_CH3 = select_backend(logits_CW).tail_sums(logits_CW, softmaxes, dtype)
        return torch.cat(
            [support_CK.where(support.own_TK, 0), picked_C1.where(picked_own_C1, 0), tails_CH3.flatten(1)], dim=1
        )

    def gather(self, shares: list[Tensor]) -> Gathered:
        """The shares of all chunks and all ranks together. Collective."""
        share_TX = torch.cat(shares)
        n_sums = self.valid_TK.shape[1] + 1
        tails_TH3 = share_TX[:, n_sums:].unflatten(1, (-1, 3))
        own_top_TH = tails_TH3[..., 0]
        top_TH = own_top_TH
        if self.tp_group is not None and len(share_TX):
            top_TH = own_top_TH.clone()
            dist.all_reduce(top_TH, op=dist.ReduceOp.MAX, group=self.tp_group)
        exists_TH = top_TH != float("-inf")
        top_TH = top_TH.where(exists_TH, 0)
        # exp(l - top) = exp(l - own) exp(own - top), and likewise for the sum that has (l - top) as a factor.
        rate_H = top_TH.new_tensor([head.inverse_temperature for head in self.softmaxes])
        lower_TH = ((own_top_TH - top_TH) * rate_H).clamp(min=-1e30)
        sum_TH = tails_TH3[..., 1] * lower_TH.exp()
        weighted_TH = tails_TH3[..., 2] * lower_TH.exp() + sum_TH * lower_TH
        sums_TX = torch.cat([share_TX[:, :n_sums], sum_TH, weighted_TH], dim=1)
        if self.tp_group is not None and len(share_TX):
            dist.all_reduce(sums_TX, group=self.tp_group)  # one rank has each id, the others have added 0
        support_TK, picked_T1, sum_TH, weighted_TH = sums_TX.split(
            [n_sums - 1, 1, len(self.softmaxes), len(self.softmaxes)], dim=1
        )

        scale_TH = sum_TH.where(exists_TH, 1).reciprocal()
        log_sum_TH = sum_TH.where(exists_TH, 1).log()
        support_TK = support_TK.where(self.valid_TK, float("-inf"))
        tail_top_T = top_TH[:, 0].where(exists_TH[:, 0], float("-inf"))
        largest_TB = torch.cat([support_TK, tail_top_T[:, None]], dim=1)
        origin_T = largest_TB.amax(1)
        log_mass_TB = (largest_TB - origin_T[:, None]) * rate_H[0]
        log_mass_TB[:, -1] += log_sum_TH[:, 0]
        return Gathered(
            log_mass_TB=log_mass_TB,
            sampled_T=picked_T1[:, 0] - (origin_T if len(self.softmaxes) == 1 else top_TH[:, -1]),
            full_T=log_sum_TH[:, -1].clone(),
            entropy_T=(log_sum_TH - weighted_TH / sum_TH).where(exists_TH, 0)[:, -1],
            top_TH=top_TH,
            scale_TH=scale_TH,
        )

    def backward(self, top_TH: Tensor, scale_TH: Tensor, grads: Sequence[Tensor | None]) -> Backward:
        """``grads``: of the outputs of :class:`Gathered`; None where nothing depends on one."""
        grad_u_TB, grad_picked_T, grad_full_T, _ = grads
        rows, dtype = len(top_TH), top_TH.dtype
        if grad_u_TB is None:
            grad_u_TB = top_TH.new_zeros(rows, self.valid_TK.shape[1] + 1)
        grad_picked_T = top_TH.new_zeros(rows) if grad_picked_T is None else grad_picked_T
        softmaxes, tails = self.softmaxes[:1], [grad_u_TB[:, -1]]
        if len(self.softmaxes) > 1 and grad_full_T is not None:  # else it is derived from the buckets, or not needed
            softmaxes, tails = self.softmaxes, [*tails, grad_full_T]
        grad_support_TK = grad_u_TB[:, :-1] * softmaxes[0].inverse_temperature
        return Backward(
            softmaxes=softmaxes,
            top_TH=top_TH[:, : len(softmaxes)],
            grad_tail_TH=torch.stack(tails, dim=1).to(dtype) * scale_TH[:, : len(softmaxes)],
            grad_support_TK=grad_support_TK.where(softmaxes[0].own_TK, 0),
            picked_columns_T1=self.picked_columns_T1,
            grad_picked_T1=grad_picked_T[:, None].where(self.picked_own_T1, 0),
        )


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The same on every rank. Less a constant of the row, numbers keep their digits however large the logits are;
    functions of them that do not depend on that constant have the gradients of the logits.
    """

    log_mass_TB: Tensor
    """Minus the constant c of the row, its largest entry but for the tail's log of a sum."""
    sampled_T: Tensor
    """The logit minus c; with two heads minus the largest logit."""
    full_T: Tensor
    """logsumexp of the last head's tail, minus its largest entry."""
    entropy_T: Tensor
    """Inside the tail of the last head."""
    top_TH: Tensor
    """Largest logit of each head's tail, as it is; any finite number where there is no tail."""
    scale_TH: Tensor
    """1 / sum exp((logit - top) / temperature) over the tail; 1 where there is no tail."""

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.log_mass_TB, self.sampled_T, self.full_T, self.entropy_T


def reading_of(query: LogitsQuery, log_mass_TB: Tensor, sampled_T: Tensor, full_T: Tensor, entropy_T: Tensor) -> StudentLogStats:
    """See :class:`Gathered`."""
    if query.temperature == 1:
        full_T = log_mass_TB.logsumexp(1)
        log_q_TB = log_mass_TB.detach().log_softmax(1)
        q_TB = log_q_TB.exp()
        # The chain rule of entropy: which bucket, then which id of the tail.
        entropy_T = q_TB[:, -1] * entropy_T - (q_TB * log_q_TB.where(q_TB > 0, 0)).sum(1)
    is_id_T = (query.sampled_T >= 0) & (query.sampled_T < query.vocab_size)
    return StudentLogStats(log_mass_TB=log_mass_TB, sampled_logp_T=(sampled_T - full_T).where(is_id_T, float("-inf")), entropy_T=entropy_T)


def chunks(rows: int, step: int) -> list[slice]:
    """At least one, so that no positions are a chunk, too."""
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


class _LogStatsOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TW: Tensor, plan: Plan, parts: list[slice], in_place: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gathered = plan.gather([plan.read(logits_TW[part], part) for part in parts])
        ctx.save_for_backward(logits_TW, gathered.top_TH, gathered.scale_TH)
        ctx.plan, ctx.parts, ctx.in_place = plan, parts, in_place
        ctx.mark_non_differentiable(gathered.entropy_T)
        ctx.set_materialize_grads(False)
        return gathered.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_TW, top_TH, scale_TH = ctx.saved_tensors
        grad_TW = logits_TW if ctx.in_place else torch.empty_like(logits_TW)
        wanted, backend = ctx.plan.backward(top_TH, scale_TH, grads), select_backend(logits_TW)
        for part in ctx.parts:
            backend.write_gradient(grad_TW[part], logits_TW[part], wanted.rows(part))
        if ctx.in_place:  # a kernel of our own does not say so, and who needs the logits later must know
            torch.autograd.graph.increment_version(logits_TW)
        return grad_TW, None, None, None
