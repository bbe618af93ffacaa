"""The teacher's distribution on the same buckets: its top-k ids and one tail that holds all other ids.

Axis names as in :mod:`~recipe_gkd.losses.vocab_parallel`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def present_entries(logps_TK: Tensor, ids_TK: Tensor, vocab_size: int) -> Tensor:
    """bool [T, K]: the entries that are buckets of their own.

    An id outside the student's vocabulary (a teacher padded to another size) and an entry of probability zero
    (a shorter top-k filled up) are not: what mass they have is part of the tail.
    """
    return (ids_TK >= 0) & (ids_TK < vocab_size) & (logps_TK > float("-inf"))


def teacher_buckets(logps_TK: Tensor, present_TK: Tensor, has_tail_T: Tensor) -> tuple[Tensor, Tensor]:
    """``(p_TB, log_p_TB)``, float64, each row a distribution; absent buckets have p = 0 and log p = 0.

    ``has_tail_T`` says whether any id is left over for the tail. Where none is, or where the rounding of the
    teacher's float32 makes the sum exceed 1, the row is divided by its sum.
    """
    logps_TK = logps_TK.double().masked_fill(~present_TK, float("-inf"))
    p_TK = logps_TK.exp()
    mass_T = p_TK.sum(1)
    tail_T = (1 - mass_T).clamp(min=0).where(has_tail_T, 0)
    p_TB = torch.cat([p_TK, tail_T[:, None]], dim=1)
    log_p_TB = torch.cat([logps_TK, tail_T.log()[:, None]], dim=1)
    total_T1 = p_TB.sum(1, keepdim=True)
    return p_TB / total_T1, (log_p_TB - total_T1.log()).where(p_TB > 0, 0)
