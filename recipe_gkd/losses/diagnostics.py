"""Numbers that say how the student differs from the teacher, beside the loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.logits_query import local_columns


@torch.no_grad()
def topk_overlap(
    logits_RW: Tensor,
    teacher_ids_RK: Tensor,
    valid_RK: Tensor,
    *,
    vocab_size: int,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """``[R]``: how many of the teacher's k present ids are among the student's k likeliest, as a share; nan for k = 0.

    It needs the student's own top-k, so it is meant for a few positions. The same on every rank; collective.
    """
    rows, width = logits_RW.shape
    first_column = 0 if tp_group is None else tp_group.rank() * width
    logits_RW = logits_RW.float()
    columns_RK, own_RK = local_columns(teacher_ids_RK, valid_RK, first_column, width)
    x_RK = logits_RW.gather(1, columns_RK).where(own_RK, 0)
    logits_RW = logits_RW.clone()
    logits_RW[:, max(vocab_size - first_column, 0) :] = float("-inf")
    best_RK = logits_RW.topk(min(teacher_ids_RK.shape[1], width), dim=1).values
    if tp_group is not None and rows:
        dist.all_reduce(x_RK, group=tp_group)
        gathered = [torch.empty_like(best_RK) for _ in range(tp_group.size())]
        dist.all_gather(gathered, best_RK, group=tp_group)
        best_RK = torch.cat(gathered, dim=1).sort(dim=1, descending=True).values
    k_R = valid_RK.sum(1)
    least_R1 = best_RK.gather(1, (k_R[:, None] - 1).clamp(min=0))
    return ((x_RK >= least_R1) & valid_RK).sum(1) / k_R


def entropy(p_TC: Tensor) -> Tensor:
    """Of each row, in nats, ``[T]``; of the teacher's buckets: at most that of its whole distribution."""
    return -torch.xlogy(p_TC, p_TC).sum(1)
