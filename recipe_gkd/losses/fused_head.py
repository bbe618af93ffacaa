"""Student statistics from hidden states and the weights of the output layer.

The logits exist one block of positions at a time. The backward pass computes each block again: it costs one matrix
product more, and its memory does not grow with T x V. Beside one block it holds the weight's gradient in float32, and
for a bfloat16 weight a second copy in bfloat16.

Shape suffixes: T positions, D hidden, W = V / tp vocabulary columns of this rank, R positions of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from recipe_gkd.losses.kernel_backend import chunk_positions, select_backend
from recipe_gkd.losses.log_stats import ShardQuery, chunks, to_student_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats

# Large enough for an efficient matrix product.
BLOCK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}


def compute_log_stats_from_hidden(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    query: LogitsQuery,
    *,
    tp_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    kernel_backend: str = "auto",
) -> StudentLogStats:
    """Return the statistics of the logits ``hidden_TD @ weight_WD.T``, differentiable in both factors. Collective.

    Args:
        hidden_TD: Hidden states, whole on every rank of ``tp_group``. So is their gradient.
        weight_WD: This rank's rows of the output layer. Rank r has the ids [r W, (r + 1) W).
        query: Requested statistics, identical on every rank.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        chunk_tokens: Positions of one block; None selects a size that suits the device.
        kernel_backend: ``gkd.kernel_backend``.
    """
    width = len(weight_WD)
    shard = ShardQuery.make(query, width, tp_group, kernel_backend)
    n_rows = chunk_tokens or max(1, BLOCK_LOGITS[hidden_TD.device.type] // max(width, 1))
    outputs = _LogStatsOfHidden.apply(hidden_TD, weight_WD, shard, chunks(len(hidden_TD), n_rows))
    return to_student_stats(query, *outputs)


class _LogStatsOfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_WD: Tensor, shard: ShardQuery, blocks: list[slice]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = []
        for block in blocks:
            logits_RW = hidden_TD[block] @ weight_WD.T
            parts += [
                shard.local_sums(logits_RW[rows], _offset(rows, block.start))
                for rows in chunks(len(logits_RW), chunk_positions(logits_RW, shard.kernel_backend))
            ]
        gathered = shard.gather(parts)
        ctx.save_for_backward(hidden_TD, weight_WD, *gathered.saved())
        ctx.shard, ctx.blocks = shard, blocks
        if not shard.entropy_has_gradient:
            ctx.mark_non_differentiable(gathered.tail_entropy_T)
        ctx.set_materialize_grads(False)
        return gathered.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_TD, weight_WD, *saved = ctx.saved_tensors
        shard: ShardQuery = ctx.shard
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        sum_dtype = torch.promote_types(weight_WD.dtype, torch.float32)  # the weight's gradient is a sum over blocks
        grad_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_WD = torch.zeros_like(weight_WD, dtype=sum_dtype) if needs_weight else None
        gradient, backend = shard.gradient_spec(saved, grads), select_backend(hidden_TD, shard.kernel_backend)
        for block in ctx.blocks:
            logits_RW = hidden_TD[block] @ weight_WD.T
            for rows in chunks(len(logits_RW), chunk_positions(logits_RW, shard.kernel_backend)):
                backend.write_gradient(logits_RW[rows], logits_RW[rows], gradient.rows(_offset(rows, block.start)))
            if grad_TD is not None:
                torch.matmul(logits_RW, weight_WD, out=grad_TD[block])
            if grad_WD is not None:
                _add_product(grad_WD, logits_RW.T, hidden_TD[block])
        if grad_TD is not None and shard.tp_group is not None and len(grad_TD):
            dist.all_reduce(grad_TD, group=shard.tp_group)
        return grad_TD, None if grad_WD is None else grad_WD.to(weight_WD.dtype), None, None


def _offset(rows: slice, start: int) -> slice:
    return slice(start + rows.start, start + rows.stop)


def _add_product(total_WD: Tensor, left_WR: Tensor, right_RD: Tensor) -> None:
    if left_WR.dtype == total_WD.dtype:
        total_WD.addmm_(left_WR, right_RD)
    else:
        total_WD += left_WR @ right_RD
