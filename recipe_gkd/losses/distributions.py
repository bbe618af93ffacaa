"""Teacher and student on the same outcomes: the teacher's top-k ids, and what becomes of all other ids (``tail``).

- ``bucket``: one more outcome, that of any other id. Both rows are distributions, so a divergence of them is one: zero
  only if they agree on every bucket, and, by data processing, at most that of the whole vocabulary. Which student mass
  lies where inside the tail is not seen; how much lies there is.
- ``renormalize``: both rows are divided by their mass on the support. Biased: it compares p(. | support) with
  q(. | support), and student mass off the support costs nothing, so it can grow unseen (verl's issue 5041 is a
  collapse of that kind).
- ``none``: the sum runs over the support alone, with the true p and q. Biased: the sum of a part is no divergence. It
  may be negative, and but for ``jsd`` and ``tvd`` it is not least at q = p: forward KL pulls all mass of q to the
  support; reverse KL, least at q = p / e on each id, pushes most of it off.

With every id in the support there is no tail, and the three are equal.

Axis names: T positions, K support ids, B = K + 1 buckets, the tail last; C = B or K columns, by mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Tail = Literal["bucket", "renormalize", "none"]

LEAST_TAIL = 2.0**-24
"""What the teacher's tail has at least, where there is one: half the distance of 1 to its neighbor in float32, below
which log-probabilities in float32 cannot say whether anything is left. Without it reverse KL could be infinite."""


@dataclass(frozen=True, kw_only=True)
class BucketedDistributions:
    """What a divergence is a function of; an outcome that is not there has p = 0 and log p = log q = 0."""

    p_TC: Tensor
    log_p_TC: Tensor
    log_q_TC: Tensor
    """Differentiable."""
    valid_TC: Tensor
    """bool."""

    @property
    def q_TC(self) -> Tensor:
        """Differentiable."""
        return self.log_q_TC.exp() * self.valid_TC


def valid_entries(logps_TK: Tensor, ids_TK: Tensor, vocab_size: int) -> Tensor:
    """Bool [T, K]: the entries that are buckets of their own.

    An id outside the student's vocabulary (a teacher padded to another size) and an entry of probability zero
    (a shorter top-k filled up) are not: what mass they have is part of the tail.
    """
    return (ids_TK >= 0) & (ids_TK < vocab_size) & (logps_TK != float("-inf"))


def distributions(log_mass_TB: Tensor, teacher_logps_TK: Tensor, valid_TK: Tensor, tail: Tail) -> BucketedDistributions:
    """``log_mass_TB`` as in :class:`~recipe_gkd.losses.logits_query.StudentLogStats`; ``teacher_logps_TK``: of the whole distribution."""
    valid_TB = torch.cat([valid_TK, log_mass_TB[:, -1:] != float("-inf")], dim=1)
    log_p_TB = teacher_log_buckets(teacher_logps_TK, valid_TK, has_tail_T=valid_TB[:, -1]).to(log_mass_TB.dtype)
    valid_TC = valid_TB if tail == "bucket" else valid_TB[:, :-1]
    n_columns = valid_TC.shape[1]
    if tail == "renormalize":
        some_T1 = valid_TC.any(1, keepdim=True)  # a row without any support entry has nothing to say
        log_p_TC = log_p_TB[:, :-1].where(some_T1, 0).log_softmax(1)
        log_q_TC = log_mass_TB[:, :-1].where(some_T1, 0).log_softmax(1)
    else:
        log_p_TC, log_q_TC = log_p_TB[:, :n_columns], log_mass_TB.log_softmax(1)[:, :n_columns]
    return BucketedDistributions(
        p_TC=log_p_TC.exp().where(valid_TC, 0),
        log_p_TC=log_p_TC.where(valid_TC, 0),
        log_q_TC=log_q_TC.where(valid_TC, 0),
        valid_TC=valid_TC,
    )


def teacher_log_buckets(logps_TK: Tensor, valid_TK: Tensor, has_tail_T: Tensor) -> Tensor:
    """``log_p_TB``, float64, each row a distribution; -inf for a bucket that is not there.

    ``has_tail_T`` says whether any id is left over for the tail. Where none is, or where the rounding of the
    teacher's float32 makes the sum exceed 1, the row is divided by its sum.
    """
    logps_TK = logps_TK.double().masked_fill(~valid_TK, float("-inf"))
    tail_T = (1 - logps_TK.exp().sum(1)).clamp(min=LEAST_TAIL).where(has_tail_T, 0)
    log_p_TB = torch.cat([logps_TK, tail_T.log()[:, None]], dim=1)
    return log_p_TB - log_p_TB.logsumexp(1, keepdim=True)
