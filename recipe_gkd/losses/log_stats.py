"""Student statistics from vocab-parallel logits, with an analytic gradient.

The logits are read once forward and once backward. For the buckets of a softmax, with ``m`` the largest logit outside
the support, ``x = (logit - m) / temperature`` and ``log_mass_tail = log(sum(exp(x)))``, all up to one constant per row:

    d log_mass_k    / d logit_i = [i = id_k] / temperature
    d log_mass_tail / d logit_i = exp(x_i - log_mass_tail) / temperature                    outside the support

For the entropy H of a tail with shares ``r_i = exp(x_i) / sum(exp(x))``:

    d H / d logit_i = r_i * (sum(r * x) - x_i) / temperature

The backward pass needs no collective and no memory of the size of the logits other than the gradient.

Shape suffixes: T positions, R positions of a chunk, W vocabulary columns of this rank, K support ids, B = K + 1
buckets (tail last), H softmaxes, X columns of a concatenation.
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
from recipe_gkd.losses.logits_query import (
    GradientSpec,
    LogitsQuery,
    SoftmaxSpec,
    StudentLogStats,
    local_columns,
    softmax_specs,
)

# Finite stand-in for -inf: the product of -inf and 0 would be nan.
MIN_LOG = -1e30


def compute_log_stats(
    logits_TW: Tensor,
    query: LogitsQuery,
    *,
    tp_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    in_place: bool = False,
    kernel_backend: str = "auto",
) -> StudentLogStats:
    """Return the student's statistics, differentiable in the logits. Collective.

    Args:
        logits_TW: This rank's columns of the logits, any float dtype. Rank r has the ids [r W, (r + 1) W).
        query: Requested statistics, identical on every rank.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        chunk_tokens: Positions of one chunk; None selects a size that suits the device.
        in_place: Write the gradient over the logits. No other operation may need them after the forward pass; a second
            backward pass raises PyTorch's error about a modified tensor.
        kernel_backend: ``gkd.kernel_backend``.
    """
    shard = ShardQuery.make(query, logits_TW.shape[1], tp_group, kernel_backend)
    parts = chunks(len(logits_TW), chunk_tokens or chunk_positions(logits_TW, kernel_backend))
    return to_student_stats(query, *_LogStatsOfLogits.apply(logits_TW, shard, parts, in_place))


@dataclass(frozen=True, kw_only=True)
class ShardQuery:
    """A :class:`LogitsQuery` in the vocabulary columns of one rank.

    Attributes:
        softmaxes: Softmaxes of the query, on this rank's columns.
        sampled_columns_T1: Column of the sampled token; 0 for an id of another rank.
        sampled_is_local_T1: True if the sampled token is in this rank's shard.
        valid_TK: Valid support ids, on any rank.
        entropy_has_gradient: See :class:`LogitsQuery`.
        tp_group: Group over which the vocabulary is sharded.
        kernel_backend: ``gkd.kernel_backend``.
    """

    softmaxes: list[SoftmaxSpec]
    sampled_columns_T1: Tensor
    sampled_is_local_T1: Tensor
    valid_TK: Tensor
    entropy_has_gradient: bool
    tp_group: ProcessGroup | None
    kernel_backend: str

    @classmethod
    def make(cls, query: LogitsQuery, width: int, tp_group: ProcessGroup | None, kernel_backend: str) -> ShardQuery:
        """Return the query in a shard of ``width`` columns."""
        first_column = 0 if tp_group is None else tp_group.rank() * width
        sampled_T1 = query.sampled_T[:, None]
        columns_T1, is_local_T1 = local_columns(sampled_T1, sampled_T1 < query.vocab_size, first_column, width)
        return cls(
            softmaxes=softmax_specs(query, first_column, width),
            sampled_columns_T1=columns_T1,
            sampled_is_local_T1=is_local_T1,
            valid_TK=query.valid_TK,
            entropy_has_gradient=query.entropy_has_gradient,
            tp_group=tp_group,
            kernel_backend=kernel_backend,
        )

    def local_sums(self, logits_RW: Tensor, part: slice) -> Tensor:
        """Return this rank's support logits, sampled logit and tail sums of one chunk, [R, K + 1 + 3 H]."""
        dtype = torch.promote_types(logits_RW.dtype, torch.float32)
        softmaxes = [softmax.rows(part) for softmax in self.softmaxes]
        support_RK = logits_RW.gather(1, softmaxes[0].columns_TK).to(dtype).where(softmaxes[0].is_local_TK, 0)
        sampled_R1 = logits_RW.gather(1, self.sampled_columns_T1[part]).to(dtype)
        sums_RH3 = select_backend(logits_RW, self.kernel_backend).tail_sums(logits_RW, softmaxes, dtype)
        return torch.cat([support_RK, sampled_R1.where(self.sampled_is_local_T1[part], 0), sums_RH3.flatten(1)], dim=1)

    def gather(self, parts: list[Tensor]) -> GatheredStats:
        """Combine the sums of all chunks and all ranks. Collective.

        Args:
            parts: Results of :meth:`local_sums`, in the order of the positions.
        """
        local_TX = torch.cat(parts)
        n_ids, n_softmaxes = self.valid_TK.shape[1] + 1, len(self.softmaxes)
        local_TH3 = local_TX[:, n_ids:].unflatten(1, (-1, 3))
        local_max_TH = local_TH3[..., 0]
        max_TH = local_max_TH
        if self.tp_group is not None and len(local_TX):
            max_TH = local_max_TH.clone()
            dist.all_reduce(max_TH, op=dist.ReduceOp.MAX, group=self.tp_group)
        has_tail_TH = max_TH != float("-inf")
        max_TH = max_TH.where(has_tail_TH, 0)
        # exp(l - max) = exp(l - local max) * exp(local max - max), and likewise for the sum with the factor (l - max).
        # Not new_tensor of the list, whose copy to a GPU would make the host wait for the device.
        rate_H = torch.cat([max_TH.new_full((1,), softmax.inverse_temperature) for softmax in self.softmaxes])
        shift_TH = ((local_max_TH - max_TH) * rate_H).clamp(min=MIN_LOG)
        sum_TH = local_TH3[..., 1] * shift_TH.exp()
        weighted_TH = local_TH3[..., 2] * shift_TH.exp() + sum_TH * shift_TH
        sums_TX = torch.cat([local_TX[:, :n_ids], sum_TH, weighted_TH], dim=1)
        if self.tp_group is not None and len(local_TX):
            dist.all_reduce(sums_TX, group=self.tp_group)  # an id is on one rank; the other ranks add 0
        support_TK, sampled_T1, sum_TH, weighted_TH = sums_TX.split([n_ids - 1, 1, n_softmaxes, n_softmaxes], dim=1)

        log_sum_TH = sum_TH.where(has_tail_TH, 1).log()
        support_TK = support_TK.where(self.valid_TK, float("-inf"))
        tail_max_T = max_TH[:, 0].where(has_tail_TH[:, 0], float("-inf"))
        largest_TB = torch.cat([support_TK, tail_max_T[:, None]], dim=1)
        origin_T = largest_TB.amax(1)
        log_mass_TB = (largest_TB - origin_T[:, None]) * rate_H[0]
        log_mass_TB[:, -1] += log_sum_TH[:, 0]
        return GatheredStats(
            log_mass_TB=log_mass_TB,
            sampled_T=sampled_T1[:, 0] - (origin_T if n_softmaxes == 1 else max_TH[:, -1]),
            log_sum_T=log_sum_TH[:, -1].clone(),
            tail_entropy_T=(log_sum_TH - weighted_TH / sum_TH).where(has_tail_TH, 0)[:, -1],
            max_TH=max_TH,
            scale_TH=sum_TH.where(has_tail_TH, 1).reciprocal(),
            mean_x_T=(weighted_TH / sum_TH).where(has_tail_TH, 0)[:, -1],
        )

    def gradient_spec(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> GradientSpec:
        """Return the coefficients of the gradient in this rank's logits.

        Args:
            saved: :meth:`GatheredStats.saved`.
            grads: Gradients of :meth:`GatheredStats.outputs`; None for an output that the loss does not use.
        """
        max_TH, scale_TH, mean_x_T = saved
        grad_log_mass_TB, grad_sampled_T, grad_log_sum_T, grad_entropy_T = grads
        n_rows, dtype = len(max_TH), max_TH.dtype
        if grad_log_mass_TB is None:
            grad_log_mass_TB = max_TH.new_zeros(n_rows, self.valid_TK.shape[1] + 1)
        if grad_sampled_T is None:
            grad_sampled_T = max_TH.new_zeros(n_rows)
        softmaxes, grad_tails = self.softmaxes[:1], [grad_log_mass_TB[:, -1]]
        if len(self.softmaxes) > 1 and not (grad_log_sum_T is None and grad_entropy_T is None):
            softmaxes = self.softmaxes
            grad_tails.append(max_TH.new_zeros(n_rows) if grad_log_sum_T is None else grad_log_sum_T)
        scale_TH = scale_TH[:, : len(softmaxes)]
        grad_tail_TH = torch.stack(grad_tails, dim=1).to(dtype) * scale_TH
        grad_slope_TH = None
        if grad_entropy_T is not None:  # d H / d x = share * (mean of x - x)
            grad_slope_TH = torch.zeros_like(grad_tail_TH)
            grad_slope_TH[:, -1] = -grad_entropy_T * scale_TH[:, -1]
            grad_tail_TH[:, -1] -= grad_slope_TH[:, -1] * mean_x_T
        grad_support_TK = grad_log_mass_TB[:, :-1] * softmaxes[0].inverse_temperature
        return GradientSpec(
            softmaxes=softmaxes,
            max_TH=max_TH[:, : len(softmaxes)],
            grad_tail_TH=grad_tail_TH,
            grad_slope_TH=grad_slope_TH,
            grad_support_TK=grad_support_TK.where(softmaxes[0].is_local_TK, 0),
            sampled_columns_T1=self.sampled_columns_T1,
            grad_sampled_T1=grad_sampled_T[:, None].where(self.sampled_is_local_T1, 0),
        )


@dataclass(frozen=True, kw_only=True)
class GatheredStats:
    """Statistics over all ranks, each shifted by a per-row constant, to keep precision for large logits.

    A function of the outputs that does not depend on these constants has the gradient of the same function of the
    logits.

    Attributes:
        log_mass_TB: Log masses of the buckets, less the row's largest support logit or tail maximum.
        sampled_T: Sampled logit, less the same constant; with two softmaxes less the largest logit.
        log_sum_T: Logsumexp of the last softmax's tail, less its maximum.
        tail_entropy_T: Entropy inside the last softmax's tail; 0 for an empty tail.
        max_TH: Largest logit of each tail; 0 for an empty tail.
        scale_TH: 1 / sum(exp(x)) of each tail; 1 for an empty tail.
        mean_x_T: Mean of x over the last softmax's tail; 0 for an empty tail.
    """

    log_mass_TB: Tensor
    sampled_T: Tensor
    log_sum_T: Tensor
    tail_entropy_T: Tensor
    max_TH: Tensor
    scale_TH: Tensor
    mean_x_T: Tensor

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the outputs of the autograd functions."""
        return self.log_mass_TB, self.sampled_T, self.log_sum_T, self.tail_entropy_T

    def saved(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that :meth:`ShardQuery.gradient_spec` needs."""
        return self.max_TH, self.scale_TH, self.mean_x_T


def to_student_stats(
    query: LogitsQuery, log_mass_TB: Tensor, sampled_T: Tensor, log_sum_T: Tensor, tail_entropy_T: Tensor
) -> StudentLogStats:
    """Return the statistics of a query from :meth:`GatheredStats.outputs`."""
    entropy_T = tail_entropy_T
    if query.temperature == 1:
        log_sum_T = log_mass_TB.logsumexp(1)
        # Chain rule of the entropy: entropy of the buckets, plus the entropy inside the tail times the tail's mass.
        log_q_TB = (log_mass_TB if query.entropy_has_gradient else log_mass_TB.detach()).log_softmax(1)
        q_TB = log_q_TB.exp()
        entropy_T = q_TB[:, -1] * tail_entropy_T - (q_TB * log_q_TB.where(q_TB > 0, 0)).sum(1)
    is_id_T = (query.sampled_T >= 0) & (query.sampled_T < query.vocab_size)
    sampled_logp_T = (sampled_T - log_sum_T).where(is_id_T, float("-inf"))
    return StudentLogStats(log_mass_TB=log_mass_TB, sampled_logp_T=sampled_logp_T, entropy_T=entropy_T)


def chunks(n_rows: int, step: int) -> list[slice]:
    """Return slices of at most ``step`` rows; one empty slice for no rows."""
    return [slice(start, min(start + step, n_rows)) for start in range(0, max(n_rows, 1), step)]


class _LogStatsOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TW: Tensor, shard: ShardQuery, parts: list[slice], in_place: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gathered = shard.gather([shard.local_sums(logits_TW[part], part) for part in parts])
        ctx.save_for_backward(logits_TW, *gathered.saved())
        ctx.shard, ctx.parts, ctx.in_place = shard, parts, in_place
        if not shard.entropy_has_gradient:
            ctx.mark_non_differentiable(gathered.tail_entropy_T)
        ctx.set_materialize_grads(False)
        return gathered.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_TW, *saved = ctx.saved_tensors
        grad_TW = logits_TW if ctx.in_place else torch.empty_like(logits_TW)
        gradient = ctx.shard.gradient_spec(saved, grads)
        backend = select_backend(logits_TW, ctx.shard.kernel_backend)
        for part in ctx.parts:
            backend.write_gradient(grad_TW[part], logits_TW[part], gradient.rows(part))
        if ctx.in_place:  # Triton kernels do not update the version counter that autograd checks
            torch.autograd.graph.increment_version(logits_TW)
        return grad_TW, None, None, None
