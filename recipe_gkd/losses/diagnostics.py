"""Measures of the difference between student and teacher, reported beside the loss."""

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
    """Return the fraction of the support's k ids that are among the student's k likeliest. Collective.

    It computes the student's top-k, so call it for a small number of positions only.

    Args:
        logits_RW: This rank's columns of the student's logits.
        teacher_ids_RK: Global ids of the support; -1 for an unused entry.
        valid_RK: Entries that exist, bool.
        vocab_size: Number of real ids; columns from here on are padding.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.

    Returns:
        Fraction at each position, [R], identical on every rank; nan for a position without a valid entry.
    """
    n_rows, width = logits_RW.shape
    first_column = 0 if tp_group is None else tp_group.rank() * width
    logits_RW = logits_RW.float()
    columns_RK, is_local_RK = local_columns(teacher_ids_RK, valid_RK, first_column, width)
    teacher_logits_RK = logits_RW.gather(1, columns_RK).where(is_local_RK, 0)
    logits_RW = logits_RW.clone()
    logits_RW[:, max(vocab_size - first_column, 0) :] = float("-inf")
    best_RK = logits_RW.topk(min(teacher_ids_RK.shape[1], width), dim=1).values
    if tp_group is not None and n_rows:
        dist.all_reduce(teacher_logits_RK, group=tp_group)
        gathered = [torch.empty_like(best_RK) for _ in range(tp_group.size())]
        dist.all_gather(gathered, best_RK, group=tp_group)
        best_RK = torch.cat(gathered, dim=1).sort(dim=1, descending=True).values
    k_R = valid_RK.sum(1)
    threshold_R1 = best_RK.gather(1, (k_R[:, None] - 1).clamp(min=0))
    return ((teacher_logits_RK >= threshold_R1) & valid_RK).sum(1) / k_R


def entropy(p_TC: Tensor) -> Tensor:
    """Return the entropy of each row, in nats, [T].

    The entropy of buckets is at most the entropy of the whole distribution.
    """
    log_p_TC = p_TC.clamp(min=torch.finfo(p_TC.dtype).tiny).log()  # not xlogy, which takes several times as long
    return -(p_TC * log_p_TC).sum(1)
