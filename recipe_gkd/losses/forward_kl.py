"""Forward KL(teacher || student), mass-covering: the teacher's top-k ids and one bucket for the rest of the vocabulary.

    L = sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail)

It is a divergence of two true distributions (the data-processing coarsening of the full KL, hence a lower bound of it),
zero only if they agree on every bucket. Its gradient in the student's logits is

    dL/dl_i = q_i - p_i                       on the support
    dL/dl_i = (1 - p_tail / q_tail) q_i       off it

which sums to zero over the vocabulary; dropping the tail leaves a gradient that pushes the logsumexp down for nothing.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.buckets import present_entries, teacher_buckets
from recipe_gkd.losses.vocab_parallel import bucket_log_masses


def forward_kl(
    logits_TW: Tensor,
    teacher_logps_TK: Tensor,
    teacher_ids_TK: Tensor,
    *,
    vocab_size: int,
    tp_group: ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss ``[T]`` in nats and detached diagnostics ``[T]``, the same on every rank of ``tp_group``.

    ``logits_TW``: this rank's columns of the student's logits, W = (padded V) / tp, any float dtype; differentiable.
    ``teacher_logps_TK``: float32 log-probabilities under the teacher's whole distribution, not renormalised.
    ``teacher_ids_TK``: int64 global ids, distinct in a row; an id that the student does not have belongs to the tail.
    ``vocab_size``: ids from here on are padding of the student's vocabulary.

    Diagnostics: ``teacher_topk_mass`` and ``student_topk_mass``, the probability of the support under each.
    """
    present_TK = present_entries(teacher_logps_TK, teacher_ids_TK, vocab_size)
    u_TB = bucket_log_masses(logits_TW, teacher_ids_TK, present_TK, vocab_size=vocab_size, tp_group=tp_group)
    log_q_TB = u_TB.log_softmax(1)
    p_TB, log_p_TB = teacher_buckets(teacher_logps_TK, present_TK, has_tail_T=u_TB[:, -1] > float("-inf"))

    # A bucket without teacher mass adds nothing, even where log q is -inf.
    loss_T = (p_TB * (log_p_TB - log_q_TB.where(p_TB > 0, 0))).sum(1)
    diagnostics = {
        "teacher_topk_mass": p_TB[:, :-1].sum(1),
        "student_topk_mass": log_q_TB.detach()[:, :-1].exp().sum(1),
    }
    return loss_T.to(log_q_TB.dtype), diagnostics
