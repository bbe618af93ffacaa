"""Teacher and student as distributions on the same outcomes: the ids of the support, and the tail of all other ids.

Tail modes (``gkd.tail``):

- ``bucket``: The tail is one more outcome. Both rows are distributions, so the result is a divergence: 0 only if the
  student equals the teacher in every bucket, and at most the divergence over the whole vocabulary (data processing
  inequality). The mass of the student's tail is penalized; its distribution inside the tail is not.
- ``renormalize``: Both rows are divided by their mass on the support. Biased: student mass outside the support costs
  nothing, so it can grow unnoticed (verl issue 5041 is a collapse of this kind).
- ``none``: The sum runs over the support only, with the true p and q. Biased: a partial sum is not a divergence. It
  may be negative, and except for ``jsd``, ``tvd`` and ``kl_rkl`` with ``rkl_ratio=0.5`` its minimum is not at q = p.
  Forward KL pulls all mass of q onto the support. Reverse KL, with its minimum at q = p / e on each id, pushes most
  of it off.
- ``generalized``: As ``none``, with the generalized KL of measures that do not sum to 1, sum(p (log p - log q) - p + q)
  (arXiv:2606.30406; Csiszar 1991). It is at least 0, and 0 only at q = p on the support; the mass of the tail has no
  term. ``jsd`` and ``tvd`` are those of ``none``.

If the support is the whole vocabulary there is no tail, and all modes are equal.

Shape suffixes: T positions, K support ids, B = K + 1 buckets (tail last), C outcomes: B or K, by mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipe_gkd.errors import ConfigError

TAIL_MODES = ("bucket", "renormalize", "none", "generalized")

# Lower bound of the teacher's tail if some id is outside the support. It is half the distance from 1 to the next
# smaller float32 number; float32 log-probabilities cannot resolve less. Without it reverse KL could be infinite.
MIN_TAIL_MASS = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class BucketedDistributions:
    """Teacher P and student Q on the same outcomes. An invalid outcome has p = 0 and log p = log q = 0.

    Attributes:
        p_TC: Probabilities of the teacher.
        log_p_TC: Their logarithms.
        log_q_TC: Log-probabilities of the student. Differentiable.
        valid_TC: True for the outcomes that exist, bool.
        is_generalized: True if a KL divergence has the terms of measures that do not sum to 1.
    """

    p_TC: Tensor
    log_p_TC: Tensor
    log_q_TC: Tensor
    valid_TC: Tensor
    is_generalized: bool = False

    @property
    def q_TC(self) -> Tensor:
        """Probabilities of the student; 0 for an invalid outcome. Differentiable."""
        return self.log_q_TC.exp() * self.valid_TC


def valid_entries(logps_TK: Tensor, ids_TK: Tensor, vocab_size: int) -> Tensor:
    """Return a mask of the entries of a support that have their own bucket.

    An id outside the student's vocabulary (of a teacher whose output layer has another size) and an entry with
    probability 0 (padding of a shorter top-k) are not. Their mass belongs to the tail.

    Returns:
        Bool [T, K].
    """
    return (ids_TK >= 0) & (ids_TK < vocab_size) & (logps_TK != float("-inf"))


def bucketed_distributions(
    log_mass_TB: Tensor, teacher_logps_TK: Tensor, valid_TK: Tensor, tail: str
) -> BucketedDistributions:
    """Return teacher and student on the outcomes of a tail mode.

    Args:
        log_mass_TB: Student's log masses; see :class:`~recipe_gkd.losses.logits_query.StudentLogStats`.
        teacher_logps_TK: Log-probabilities under the teacher's whole distribution, not renormalized.
        valid_TK: Result of :func:`valid_entries`.
        tail: One of ``TAIL_MODES``.

    Raises:
        ConfigError: ``tail`` is unknown.
    """
    if tail not in TAIL_MODES:
        raise ConfigError(f"got tail mode {tail!r}, expected one of {', '.join(TAIL_MODES)}", keys=("gkd.tail",))
    valid_TB = torch.cat([valid_TK, log_mass_TB[:, -1:] != float("-inf")], dim=1)
    log_p_TB = teacher_log_buckets(teacher_logps_TK, valid_TK, has_tail_T=valid_TB[:, -1]).to(log_mass_TB.dtype)
    valid_TC = valid_TB if tail == "bucket" else valid_TB[:, :-1]
    n_outcomes = valid_TC.shape[1]
    if tail == "renormalize":
        any_T1 = valid_TC.any(1, keepdim=True)  # a row without a valid entry cannot be normalized
        log_p_TC = log_p_TB[:, :-1].where(any_T1, 0).log_softmax(1)
        log_q_TC = log_mass_TB[:, :-1].where(any_T1, 0).log_softmax(1)
    else:
        log_p_TC, log_q_TC = log_p_TB[:, :n_outcomes], log_mass_TB.log_softmax(1)[:, :n_outcomes]
    return BucketedDistributions(
        p_TC=log_p_TC.exp().where(valid_TC, 0),
        log_p_TC=log_p_TC.where(valid_TC, 0),
        log_q_TC=log_q_TC.where(valid_TC, 0),
        valid_TC=valid_TC,
        is_generalized=tail == "generalized",
    )


def teacher_log_buckets(logps_TK: Tensor, valid_TK: Tensor, has_tail_T: Tensor) -> Tensor:
    """Return the teacher's log-probability of each bucket.

    A row without a tail, or whose float32 probabilities sum to more than 1, is divided by its sum.

    Args:
        logps_TK: Log-probabilities under the teacher's whole distribution.
        valid_TK: Entries that have their own bucket, bool.
        has_tail_T: True if an id is outside the support, bool.

    Returns:
        Float64 [T, B]. Each row is a distribution; -inf for an invalid bucket.
    """
    logps_TK = logps_TK.double().masked_fill(~valid_TK, float("-inf"))
    tail_T = (1 - logps_TK.exp().sum(1)).clamp(min=MIN_TAIL_MASS).where(has_tail_T, 0)
    log_p_TB = torch.cat([logps_TK, tail_T.log()[:, None]], dim=1)
    return log_p_TB - log_p_TB.logsumexp(1, keepdim=True)
