"""A divergence at each position, from logits and a teacher's top-k, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.distributions import bucketed_distributions, valid_entries
from recipe_gkd.losses.divergences import Divergence
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats


def topk_divergence(
    logits_TW: Tensor,
    teacher_logps_TK: Tensor,
    teacher_ids_TK: Tensor,
    divergence: Divergence,
    *,
    vocab_size: int,
    tp_group: ProcessGroup | None = None,
    **options: Any,
) -> tuple[Tensor, StudentLogStats]:
    """Return the divergence of student and teacher, differentiable in the logits. Collective.

    Args:
        logits_TW: This rank's columns of the student's logits, W = (padded V) / tp, any float dtype.
        teacher_logps_TK: Log-probabilities of the teacher's whole distribution at ``divergence.temperature``, float32,
            not renormalized; -inf for a missing entry.
        teacher_ids_TK: Global ids, int64, distinct in a row. An id that the student does not have is a missing entry.
        divergence: Kind, tail mode, temperature and parameters.
        vocab_size: Number of real ids; columns from here on are padding of the student's vocabulary.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        options: ``chunk_tokens``, ``in_place`` and ``kernel_backend`` of
            :func:`~recipe_gkd.losses.log_stats.compute_log_stats`.

    Returns:
        Divergence in nats, [T], and the student's statistics; identical on every rank of ``tp_group``.
    """
    valid_TK = valid_entries(teacher_logps_TK, teacher_ids_TK, vocab_size)
    query = LogitsQuery(
        ids_TK=teacher_ids_TK,
        valid_TK=valid_TK,
        sampled_T=torch.zeros(len(logits_TW), dtype=torch.int64, device=logits_TW.device),
        vocab_size=vocab_size,
        temperature=divergence.temperature,
    )
    stats = compute_log_stats(logits_TW, query, tp_group=tp_group, **options)
    distributions = bucketed_distributions(stats.log_mass_TB, teacher_logps_TK, valid_TK, divergence.tail)
    return divergence(distributions), stats
