"""Divergences of teacher P and student Q at each position, nats, ``[T]``: functions of their :class:`Outcomes`.

Their gradients come from autograd on ``[T, C]`` tensors; tensors of the vocabulary's width are in ``reading.py`` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from recipe_gkd.losses.distributions import BucketedDistributions, Tail

Kind = Literal["forward_kl", "reverse_kl", "jsd", "kl_rkl", "skewed_forward_kl", "skewed_reverse_kl", "tvd"]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A choice among the functions below, with their parameters, of outcomes that were read with this tail and this
    temperature.
    """

    kind: Kind = "forward_kl"
    tail: Tail = "bucket"
    """See :mod:`~recipe_gkd.losses.distributions`."""
    temperature: float = 1.0
    """Both distributions are those of logits / temperature. The value is not multiplied by its square."""
    beta: float = 0.5
    rkl_ratio: float = 0.5
    skew_alpha: float = 0.1

    def of(self, distributions: BucketedDistributions) -> Tensor:
        match self.kind:
            case "forward_kl":
                return forward_kl(distributions)
            case "reverse_kl":
                return reverse_kl(distributions)
            case "jsd":
                return jsd(distributions, beta=self.beta)
            case "kl_rkl":
                return kl_rkl(distributions, rkl_ratio=self.rkl_ratio)
            case "skewed_forward_kl":
                return skewed_forward_kl(distributions, skew_alpha=self.skew_alpha)
            case "skewed_reverse_kl":
                return skewed_reverse_kl(distributions, skew_alpha=self.skew_alpha)
            case "tvd":
                return tvd(distributions)


def forward_kl(distributions: BucketedDistributions) -> Tensor:
    """KL(P || Q) = sum p (log p - log q): mass-covering (Hinton et al. 2015, arXiv 1503.02531).

    With a tail bucket, dL/dl_i = q_i - p_i on the support and (1 - p_tail / q_tail) q_i off it.
    """
    return (distributions.p_TC * (distributions.log_p_TC - distributions.log_q_TC)).sum(1)


def reverse_kl(distributions: BucketedDistributions) -> Tensor:
    """KL(Q || P) = sum q (log q - log p): mode-seeking (Gu et al. 2024, MiniLLM, arXiv 2306.08543)."""
    return (distributions.q_TC * (distributions.log_q_TC - distributions.log_p_TC)).sum(1)


def kl_rkl(distributions: BucketedDistributions, *, rkl_ratio: float) -> Tensor:
    """(1 - r) KL(P || Q) + r KL(Q || P)."""
    return (1 - rkl_ratio) * forward_kl(distributions) + rkl_ratio * reverse_kl(distributions)


def jsd(distributions: BucketedDistributions, *, beta: float) -> Tensor:
    """Generalized Jensen-Shannon: b KL(P || M) + (1 - b) KL(Q || M), M = b P + (1 - b) Q (Agarwal et al. 2024, GKD,
    arXiv 2306.13649, eq. 1). Divided by b it tends to forward KL for b -> 0, by 1 - b to reverse KL for b -> 1.
    """
    log_m_TC = _log_mixture(distributions, beta)
    to_p_T = (distributions.p_TC * (distributions.log_p_TC - log_m_TC)).sum(1)
    to_q_T = (distributions.q_TC * (distributions.log_q_TC - log_m_TC)).sum(1)
    return beta * to_p_T + (1 - beta) * to_q_T


def skewed_forward_kl(distributions: BucketedDistributions, *, skew_alpha: float) -> Tensor:
    """KL(P || a P + (1 - a) Q): at most -log a, bounded gradient (Ko et al. 2024, DistiLLM, arXiv 2402.03898)."""
    return (distributions.p_TC * (distributions.log_p_TC - _log_mixture(distributions, skew_alpha))).sum(1)


def skewed_reverse_kl(distributions: BucketedDistributions, *, skew_alpha: float) -> Tensor:
    """KL(Q || (1 - a) P + a Q): finite also where P has no mass (DistiLLM, as above)."""
    return (distributions.q_TC * (distributions.log_q_TC - _log_mixture(distributions, 1 - skew_alpha))).sum(1)


def tvd(distributions: BucketedDistributions) -> Tensor:
    """Total variation, half of sum |p - q|: between 0 and 1 (Wen et al. 2023, f-distill, arXiv 2307.15190)."""
    return 0.5 * (distributions.p_TC - distributions.q_TC).abs().sum(1)


def _log_mixture(distributions: BucketedDistributions, teacher_share: float) -> Tensor:
    """log(a P + (1 - a) Q), and 0 for an outcome that is not there."""
    log_p_TC = distributions.log_p_TC + math.log(teacher_share)
    log_q_TC = distributions.log_q_TC + math.log1p(-teacher_share)
    return log_p_TC.logaddexp(log_q_TC).where(distributions.valid_TC, 0)
