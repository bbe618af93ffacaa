"""Student statistics from hidden states and the weights of the output layer.

The logits exist one block of positions at a time, in memory that all blocks share, so the memory does not grow with
T x V. The backward pass computes all blocks but the last again, which costs up to one matrix product more. Beside one
block it holds the weight's gradient, and for a 16-bit weight a second copy of it in float32.

Shape suffixes: T positions, D hidden, W = V / tp vocabulary columns of this rank, R positions of a block.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from recipe_gkd.losses.float32_head import matmul_float32, round_in_place
from recipe_gkd.losses.kernel_backend import CPU_CHUNK_ELEMENTS, chunk_positions, select_backend
from recipe_gkd.losses.log_stats import ShardQuery, chunks, to_student_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats

# Large enough for efficient matrix products, and for few additions to the sum of the weight's gradient. On an H200 the
# loss takes a quarter longer with 256 MiB (docs/performance.md).
BLOCK_BYTES = {"cpu": 112 << 20, "cuda": 1 << 30}


def compute_log_stats_from_hidden(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    query: LogitsQuery,
    *,
    tp_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    kernel_backend: str = "auto",
    float32_head: bool = False,
) -> StudentLogStats:
    """Return the statistics of the logits ``hidden_TD @ weight_WD.T``, differentiable in both factors. Collective.

    Args:
        hidden_TD: Hidden states, whole on every rank of ``tp_group``. So is their gradient.
        weight_WD: This rank's rows of the output layer. Rank r has the ids [r W, (r + 1) W).
        query: Requested statistics, identical on every rank.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        chunk_tokens: Positions of one block; None selects a size that suits the device.
        kernel_backend: ``gkd.kernel_backend``.
        float32_head: Compute float32 logits from 16-bit factors; see :mod:`~recipe_gkd.losses.float32_head`.
    """
    shard = ShardQuery.make(query, len(weight_WD), tp_group, kernel_backend)
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32) if float32_head else hidden_TD.dtype
    block_bytes = BLOCK_BYTES[hidden_TD.device.type]
    n_rows = chunk_tokens or max(1, block_bytes // (max(len(weight_WD), 1) * dtype.itemsize))
    blocks = _blocks(len(hidden_TD), n_rows)
    return to_student_stats(query, *_LogStatsOfHidden.apply(hidden_TD, weight_WD, shard, blocks, dtype))


class _LogStatsOfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_WD: Tensor, shard: ShardQuery, blocks: list[slice], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = []
        # Fresh memory for each block would cost page faults on a CPU, which take half as long as the product.
        memory_RW = hidden_TD.new_empty(blocks[-1].stop - blocks[-1].start, len(weight_WD), dtype=dtype)
        for block in blocks:
            logits_RW = _write_logits(memory_RW, hidden_TD[block], weight_WD)
            parts += [
                shard.local_sums(logits_RW[rows], _offset(rows, block.start))
                for rows in chunks(len(logits_RW), chunk_positions(logits_RW, shard.kernel_backend))
            ]
        gathered = shard.gather(parts)
        ctx.save_for_backward(hidden_TD, weight_WD, *gathered.saved())
        ctx.shard, ctx.blocks, ctx.dtype = shard, blocks, dtype
        ctx.last_logits_RW = memory_RW  # the backward pass starts with the last block
        if not shard.entropy_has_gradient:
            ctx.mark_non_differentiable(gathered.tail_entropy_T)
        ctx.set_materialize_grads(False)
        return gathered.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_WD, *saved = ctx.saved_tensors
        shard: ShardQuery = ctx.shard
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        weight_sum = _WeightGradient(weight_WD) if needs_weight else None
        gradient, backend = shard.gradient_spec(saved, grads), select_backend(hidden_TD, shard.kernel_backend)
        memory_RW, ctx.last_logits_RW = ctx.last_logits_RW, None  # a second backward pass has no logits
        is_computed = memory_RW is not None
        if not is_computed:
            memory_RW = hidden_TD.new_empty(ctx.blocks[-1].stop - ctx.blocks[-1].start, len(weight_WD), dtype=ctx.dtype)
        for block in reversed(ctx.blocks):
            logits_RW = memory_RW[: block.stop - block.start]
            if not is_computed:
                _write_logits(memory_RW, hidden_TD[block], weight_WD)
            is_computed = False
            for rows in chunks(len(logits_RW), chunk_positions(logits_RW, shard.kernel_backend)):
                backend.write_gradient(logits_RW[rows], logits_RW[rows], gradient.rows(_offset(rows, block.start)))
            grad_RW = logits_RW if ctx.dtype == weight_WD.dtype else round_in_place(logits_RW, weight_WD.dtype)
            if grad_TD is not None:
                torch.matmul(grad_RW, weight_WD, out=grad_TD[block])
            if weight_sum is not None:
                weight_sum.add_product(grad_RW.T, hidden_TD[block])
        if grad_TD is not None and shard.tp_group is not None and len(grad_TD):
            dist.all_reduce(grad_TD, group=shard.tp_group)
        return grad_TD, None if weight_sum is None else weight_sum.result(), None, None, None


class _WeightGradient:
    """Sum of the blocks' contributions to the weight's gradient, in at least float32.

    The memory of a product in the dtype of the weight is reused for each block, and for the result.
    """

    def __init__(self, weight_WD: Tensor) -> None:
        sum_dtype = torch.promote_types(weight_WD.dtype, torch.float32)
        self._sum_WD = torch.zeros_like(weight_WD, dtype=sum_dtype)
        self._product_WD = self._sum_WD if weight_WD.dtype == sum_dtype else torch.empty_like(weight_WD)

    def add_product(self, left_WR: Tensor, right_RD: Tensor) -> None:
        if self._product_WD is self._sum_WD:
            self._sum_WD.addmm_(left_WR, right_RD)
            return
        torch.mm(left_WR, right_RD, out=self._product_WD)
        width, columns = self._sum_WD.shape
        # On a CPU an addition of two dtypes allocates a converted copy of its whole operand.
        n_rows = width if self._sum_WD.is_cuda else max(1, CPU_CHUNK_ELEMENTS // max(columns, 1))
        for rows in chunks(width, n_rows):
            self._sum_WD[rows] += self._product_WD[rows]

    def result(self) -> Tensor:
        """Return the sum in the dtype of the weight."""
        return self._product_WD.copy_(self._sum_WD)


def _write_logits(memory_RW: Tensor, hidden_RD: Tensor, weight_WD: Tensor) -> Tensor:
    """Return the logits of one block in the dtype of ``memory_RW``, written to its first rows."""
    logits_RW = memory_RW[: len(hidden_RD)]
    if logits_RW.dtype == weight_WD.dtype:
        return torch.mm(hidden_RD, weight_WD.T, out=logits_RW)
    return matmul_float32(hidden_RD, weight_WD, logits_RW)


def _blocks(n_positions: int, n_rows: int) -> list[slice]:
    """Return slices of ``n_rows`` positions. Only the first may have fewer: the logits of the last save a product."""
    bounds = sorted({0, *range(n_positions % n_rows, n_positions, n_rows), n_positions})
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)] or [slice(0, 0)]


def _offset(rows: slice, start: int) -> slice:
    return slice(start + rows.start, start + rows.stop)
