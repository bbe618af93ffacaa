"""What the sampled tokens alone say about reverse KL: estimators with one sample at each position, ``[T]``, nats.

With r = log p(y) - log q(y) for a token y that was sampled from q (Schulman 2020, "Approximating KL divergence"):

    k1 = -r                   unbiased; its own gradient, -d log q, has nothing of the teacher in it
    k2 = r^2 / 2              its expected gradient is that of reverse KL
    k3 = exp(r) - 1 - r       unbiased, never negative; its expected gradient is that of *forward* KL

As a loss k1 is therefore a policy gradient: the reward of a token is r, and  -(r - b) / s  d log q  has, for b = 0 and
s = 1, the expected gradient of reverse KL at every position. Only the position itself is credited, as with the others.
No b that does not depend on the token changes the expectation; the mean of r, which is minus the reverse KL, makes it
less noisy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Importance = Literal["none", "truncate", "mask"]

FARTHEST = 20.0
"""Log-ratios beyond are as good as infinite: exp(20) is 5e8."""


def k1(
    logp_T: Tensor, teacher_logp_T: Tensor, baseline_T: Tensor | float = 0.0, scale_T: Tensor | float = 1.0
) -> Tensor:
    """The value is k1, the gradient is the policy gradient's with the advantage (r - baseline) / scale."""
    r_T = (teacher_logp_T - logp_T).detach()
    return with_gradient(-r_T, -(r_T - baseline_T) / scale_T * logp_T)


def k2(logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    return 0.5 * (teacher_logp_T - logp_T).square()


def k3(logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """Beyond r = 20 exp(r) goes on as its tangent there, so that the gradient stays finite, and stays."""
    r_T = teacher_logp_T - logp_T
    near_T, beyond_T = r_T.clamp(max=FARTHEST), (r_T - FARTHEST).clamp(min=0)
    return near_T.expm1() + beyond_T * math.exp(FARTHEST) - r_T


def importance_weights(logp_T: Tensor, sampling_logp_T: Tensor, importance: Importance, cap: float) -> Tensor:
    """q(y) / q_sampling(y), detached: what makes a sample of older weights one of these. 1 with ``none``.

    ``truncate``: at most ``cap`` (Ionides 2008); ``mask``: 0 above it. Both bound the variance at the price of a bias,
    ``mask`` of ignoring, ``truncate`` of underweighting what the student has since made likelier.
    """
    if importance == "none":
        return torch.ones_like(logp_T)
    ratio_T = probability_ratio(logp_T.detach(), sampling_logp_T)
    return ratio_T.clamp(max=cap) if importance == "truncate" else ratio_T.where(ratio_T <= cap, 0)


def probability_ratio(logp_T: Tensor, sampling_logp_T: Tensor) -> Tensor:
    return (logp_T - sampling_logp_T).clamp(-FARTHEST, FARTHEST).exp()


def with_gradient(value_T: Tensor, surrogate_T: Tensor) -> Tensor:
    """The one's value, the other's gradient."""
    return value_T.detach() + (surrogate_T - surrogate_T.detach())
