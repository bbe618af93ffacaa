"""The same reading from hidden states and the output layer's weights: logits exist one block of positions at a time.

The backward pass computes each block again: one matrix product more, for memory that does not grow with T x V. What it
needs beside a block is the weight's gradient in float32, and for a bfloat16 weight one more in bfloat16.

Axis names: T positions, D hidden, W = V / tp columns of one rank, R rows (positions) of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from recipe_gkd.losses.kernel_backend import chunk_positions, select_backend
from recipe_gkd.losses.log_stats import Plan, chunks, reading_of
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats

BLOCK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits of a block: enough rows for a matrix product to be efficient."""


def compute_log_stats_from_hidden(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    query: LogitsQuery,
    *,
    tp_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> StudentLogStats:
    """As :func:`~recipe_gkd.losses.log_stats.compute_log_stats` of ``hidden_TD @ weight_WD.T``; differentiable in both.

    ``hidden_TD`` is whole on every rank of ``tp_group``, and so is its gradient; rank r has the rows
    [r W, (r + 1) W) of the weight. ``chunk_tokens``: positions of a block; None: as many as suit the device.
    """
    width = len(weight_WD)
    plan = Plan.make(query, width, tp_group)
    rows = chunk_tokens or max(1, BLOCK_ELEMENTS[hidden_TD.device.type] // max(width, 1))
    return reading_of(query, *_LogStatsOfHidden.apply(hidden_TD, weight_WD, plan, chunks(len(hidden_TD), rows)))


class _LogStatsOfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_WD: Tensor, plan: Plan, blocks: list[slice]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shares = []
        for block in blocks:
            logits_RW = hidden_TD[block] @ weight_WD.T
            shares += [
                plan.read(logits_RW[rows], _within(block, rows))
                for rows in chunks(len(logits_RW), chunk_positions(logits_RW))
            ]
        gathered = plan.gather(shares)
        ctx.save_for_backward(hidden_TD, weight_WD, gathered.top_TH, gathered.scale_TH)
        ctx.plan, ctx.blocks = plan, blocks
        ctx.mark_non_differentiable(gathered.entropy_T)
        ctx.set_materialize_grads(False)
        return gathered.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_TD, weight_WD, top_TH, scale_TH = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype = torch.promote_types(weight_WD.dtype, torch.float32)  # a sum over many blocks
        grad_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_WD = torch.zeros_like(weight_WD, dtype=dtype) if needs_weight else None
        wanted, backend = ctx.plan.backward(top_TH, scale_TH, grads), select_backend(hidden_TD)
        for block in ctx.blocks:
            logits_RW = hidden_TD[block] @ weight_WD.T
            for rows in chunks(len(logits_RW), chunk_positions(logits_RW)):
                backend.write_gradient(logits_RW[rows], logits_RW[rows], wanted.rows(_within(block, rows)))
            if grad_TD is not None:
                torch.matmul(logits_RW, weight_WD, out=grad_TD[block])
            if grad_WD is not None:
                _add_product(grad_WD, logits_RW.T, hidden_TD[block])
        if grad_TD is not None and ctx.plan.tp_group is not None and len(grad_TD):
            dist.all_reduce(grad_TD, group=ctx.plan.tp_group)
        return grad_TD, None if grad_WD is None else grad_WD.to(weight_WD.dtype), None, None


def _within(block: slice, rows: slice) -> slice:
    return slice(block.start + rows.start, block.start + rows.stop)


def _add_product(total_WD: Tensor, left_WR: Tensor, right_RD: Tensor) -> None:
    if left_WR.dtype == total_WD.dtype:
        total_WD.addmm_(left_WR, right_RD)
    else:
        total_WD += left_WR @ right_RD
