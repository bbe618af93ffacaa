"""Divergences between teacher P and student Q at each position, in nats.

Each is a registered function of :class:`~recipe_gkd.losses.distributions.BucketedDistributions` that returns [T]. Its
gradient is autograd's, on tensors [T, C]. Tensors of the vocabulary's width occur in
:mod:`~recipe_gkd.losses.log_stats` only.

Shape suffixes: T positions, C outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from recipe_gkd.losses.distributions import BucketedDistributions
from recipe_gkd.losses.registry import get_divergence, register_divergence


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A registered divergence with its parameters.

    Attributes:
        kind: Name of the divergence; one of :func:`~recipe_gkd.losses.registry.divergence_names`.
        tail: Treatment of ids outside the support; see :mod:`~recipe_gkd.losses.distributions`.
        temperature: Temperature of both distributions. The loss is not multiplied by its square.
        parameters: Values of the function's parameters by name, such as ``beta``.
    """

    kind: str = "forward_kl"
    tail: str = "bucket"
    temperature: float = 1.0
    parameters: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __call__(self, distributions: BucketedDistributions) -> Tensor:
        """Return the divergence at each position, in nats, [T]."""
        loss_T: Tensor = get_divergence(self.kind)(distributions, values=self.parameters)
        return loss_T


@register_divergence("forward_kl")
def forward_kl(distributions: BucketedDistributions) -> Tensor:
    """Return KL(P || Q) = sum(p (log p - log q)), mass-covering (Hinton et al. 2015, arXiv:1503.02531).

    With a tail bucket, dL/dl_i = q_i - p_i on the support and (1 - p_tail / q_tail) q_i outside it.

    Returns:
        Divergence in nats, [T].
    """
    return _kl(distributions, distributions.p_TC, distributions.log_p_TC, distributions.log_q_TC)


@register_divergence("reverse_kl")
def reverse_kl(distributions: BucketedDistributions) -> Tensor:
    """Return KL(Q || P) = sum(q (log q - log p)), mode-seeking (Gu et al. 2024, MiniLLM, arXiv:2306.08543).

    Returns:
        Divergence in nats, [T].
    """
    return _kl(distributions, distributions.q_TC, distributions.log_q_TC, distributions.log_p_TC)


@register_divergence("jsd")
def jsd(distributions: BucketedDistributions, *, beta: float = 0.5) -> Tensor:
    """Return the generalized Jensen-Shannon divergence.

    ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q`` (Agarwal et al. 2024, GKD,
    arXiv:2306.13649, eq. 1). Divided by beta it tends to forward KL for beta -> 0; divided by 1 - beta it tends to
    reverse KL for beta -> 1.

    Args:
        distributions: Teacher and student on the same outcomes.
        beta: Weight of the teacher in the mixture, in (0, 1). For 0 and 1 use ``forward_kl`` and ``reverse_kl``.

    Returns:
        Divergence in nats, [T].
    """
    log_m_TC = _log_mixture(distributions, beta)
    p_to_m_T = _kl(distributions, distributions.p_TC, distributions.log_p_TC, log_m_TC)
    q_to_m_T = _kl(distributions, distributions.q_TC, distributions.log_q_TC, log_m_TC)
    return beta * p_to_m_T + (1 - beta) * q_to_m_T


@register_divergence("kl_rkl")
def kl_rkl(distributions: BucketedDistributions, *, rkl_ratio: float = 0.5) -> Tensor:
    """Return (1 - r) KL(P || Q) + r KL(Q || P).

    Args:
        distributions: Teacher and student on the same outcomes.
        rkl_ratio: Weight r of reverse KL, in [0, 1].

    Returns:
        Divergence in nats, [T].
    """
    return (1 - rkl_ratio) * forward_kl(distributions) + rkl_ratio * reverse_kl(distributions)


@register_divergence("skewed_forward_kl")
def skewed_forward_kl(distributions: BucketedDistributions, *, skew_alpha: float = 0.1) -> Tensor:
    """Return KL(P || a P + (1 - a) Q) (Ko et al. 2024, DistiLLM, arXiv:2402.03898).

    It is at most -log(a), and its gradient is bounded.

    Args:
        distributions: Teacher and student on the same outcomes.
        skew_alpha: Weight a of the teacher in the mixture, in (0, 1).

    Returns:
        Divergence in nats, [T].
    """
    log_m_TC = _log_mixture(distributions, skew_alpha)
    return _kl(distributions, distributions.p_TC, distributions.log_p_TC, log_m_TC)


@register_divergence("skewed_reverse_kl")
def skewed_reverse_kl(distributions: BucketedDistributions, *, skew_alpha: float = 0.1) -> Tensor:
    """Return KL(Q || (1 - a) P + a Q) (Ko et al. 2024, DistiLLM, arXiv:2402.03898).

    It is finite also where P has no mass.

    Args:
        distributions: Teacher and student on the same outcomes.
        skew_alpha: Weight a of the student in the mixture, in (0, 1).

    Returns:
        Divergence in nats, [T].
    """
    log_m_TC = _log_mixture(distributions, 1 - skew_alpha)
    return _kl(distributions, distributions.q_TC, distributions.log_q_TC, log_m_TC)


@register_divergence("tvd")
def tvd(distributions: BucketedDistributions) -> Tensor:
    """Return the total variation distance, sum(|p - q|) / 2 (Wen et al. 2023, f-distill, arXiv:2307.15190).

    Returns:
        Distance, between 0 and 1, [T].
    """
    return 0.5 * (distributions.p_TC - distributions.q_TC).abs().sum(1)


def _kl(distributions: BucketedDistributions, a_TC: Tensor, log_a_TC: Tensor, log_b_TC: Tensor) -> Tensor:
    """Return KL(A || B) = sum(a (log a - log b)), and for the generalized form also sum(b - a).

    Args:
        distributions: Outcomes, and the form.
        a_TC: Probabilities; 0 for an invalid outcome.
        log_a_TC: Their logarithms; 0 for an invalid outcome.
        log_b_TC: Log-probabilities of the other distribution; 0 for an invalid outcome.
    """
    kl_T = (a_TC * (log_a_TC - log_b_TC)).sum(1)
    if not distributions.is_generalized:
        return kl_T
    return kl_T + (log_b_TC.exp() * distributions.valid_TC - a_TC).sum(1)


def _log_mixture(distributions: BucketedDistributions, teacher_weight: float) -> Tensor:
    """Return log(a P + (1 - a) Q) with a = ``teacher_weight``; 0 for an invalid outcome."""
    log_p_TC = distributions.log_p_TC + math.log(teacher_weight)
    log_q_TC = distributions.log_q_TC + math.log1p(-teacher_weight)
    return log_p_TC.logaddexp(log_q_TC).where(distributions.valid_TC, 0)
