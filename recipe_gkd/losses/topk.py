"""The whole way from logits and a teacher's top-k to a divergence at each position."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.distributions import distributions, valid_entries
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
    chunk_tokens: int | None = None,
    in_place: bool = False,
) -> tuple[Tensor, StudentLogStats]:
    """Nats ``[T]``, differentiable in the logits, and what was read of them; the same on all of ``tp_group``.

    ``logits_TW``: this rank's columns of the student's logits, W = (padded V) / tp, any float dtype.
    ``teacher_logps_TK``: float32 log-probabilities of the teacher's whole distribution at ``divergence.temperature``,
    not renormalized; -inf: no entry. ``teacher_ids_TK``: int64 global ids, distinct in a row; one that the student does
    not have is no entry. ``vocab_size``: ids from here on are padding of the student's vocabulary.
    ``chunk_tokens``, ``in_place``: see :func:`~recipe_gkd.losses.log_stats.compute_log_stats`.
    """
    valid_TK = valid_entries(teacher_logps_TK, teacher_ids_TK, vocab_size)
    query = LogitsQuery(
        ids_TK=teacher_ids_TK,
        valid_TK=valid_TK,
        sampled_T=torch.zeros(len(logits_TW), dtype=torch.int64, device=logits_TW.device),
        vocab_size=vocab_size,
        temperature=divergence.temperature,
    )
    stats = compute_log_stats(logits_TW, query, tp_group=tp_group, chunk_tokens=chunk_tokens, in_place=in_place)
    return divergence.of(distributions(stats.log_mass_TB, teacher_logps_TK, valid_TK, divergence.tail)), stats
