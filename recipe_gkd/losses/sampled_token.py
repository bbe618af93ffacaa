"""Losses on the sampled token alone: one-sample estimators of reverse KL at each position, in nats.

With r = log p(y) - log q(y) for a token y sampled from q (Schulman 2020, "Approximating KL divergence"):

    k1 = -r                   unbiased; its own gradient, -d log q, does not depend on the teacher
    k2 = r^2 / 2              its expected gradient is the gradient of reverse KL
    k3 = exp(r) - 1 - r       unbiased and never negative; its expected gradient is the gradient of *forward* KL

Therefore ``k1`` is used as a policy gradient. The reward of a token is r, and -(r - b) / s d log q has, for b = 0 and
s = 1, the expected gradient of reverse KL at the position. A baseline b that does not depend on the token leaves the
expectation unchanged. The mean of r, which is minus the reverse KL, reduces the variance. Like the other losses it
credits a token for its own position only.

Shape suffix: T response tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipe_gkd.errors import ConfigError
from recipe_gkd.losses.registry import register_sampled_token_loss

IMPORTANCE_MODES = ("none", "truncate", "mask")

# Log-ratios beyond this bound are treated as equal to it: exp(20) is 5e8.
MAX_LOG_RATIO = 20.0


@register_sampled_token_loss("k1")
def k1(
    logp_T: Tensor, teacher_logp_T: Tensor, baseline_T: Tensor | float = 0.0, scale_T: Tensor | float = 1.0
) -> Tensor:
    """Return k1 with the policy gradient of the advantage (r - baseline) / scale.

    Args:
        logp_T: Log-probability of the sampled token under the student. Differentiable.
        teacher_logp_T: Log-probability of the sampled token under the teacher.
        baseline_T: Baseline b, in nats.
        scale_T: Scale s.

    Returns:
        Value of k1 at each position, in nats, [T].
    """
    r_T = (teacher_logp_T - logp_T).detach()
    return with_gradient(-r_T, -(r_T - baseline_T) / scale_T * logp_T)


@register_sampled_token_loss("k2")
def k2(logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """Return k2 = r^2 / 2.

    Args:
        logp_T: Log-probability of the sampled token under the student. Differentiable.
        teacher_logp_T: Log-probability of the sampled token under the teacher.

    Returns:
        Value of k2 at each position, [T].
    """
    return 0.5 * (teacher_logp_T - logp_T).square()


@register_sampled_token_loss("k3")
def k3(logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """Return k3 = exp(r) - 1 - r.

    Above r = 20 the exponential continues as its tangent, so that the gradient stays finite and does not vanish.

    Args:
        logp_T: Log-probability of the sampled token under the student. Differentiable.
        teacher_logp_T: Log-probability of the sampled token under the teacher.

    Returns:
        Value of k3 at each position, in nats, [T].
    """
    r_T = teacher_logp_T - logp_T
    bounded_T, excess_T = r_T.clamp(max=MAX_LOG_RATIO), (r_T - MAX_LOG_RATIO).clamp(min=0)
    return bounded_T.expm1() + excess_T * math.exp(MAX_LOG_RATIO) - r_T


def importance_weights(logp_T: Tensor, sampling_logp_T: Tensor, importance: str, cap: float) -> Tensor:
    """Return the importance weights q(y) / q_sampling(y), detached.

    They correct for tokens that older weights sampled. Both caps bound the variance and introduce a bias: tokens that
    the student has made much more likely are underweighted by ``truncate`` and ignored by ``mask``.

    Args:
        logp_T: Log-probability of the sampled token under the student.
        sampling_logp_T: Log-probability of the sampled token under the weights that sampled it.
        importance: One of ``IMPORTANCE_MODES``. ``none`` returns 1; ``truncate`` limits weights to ``cap`` (Ionides
            2008); ``mask`` sets weights above ``cap`` to 0.
        cap: Largest weight.

    Returns:
        Weight of each position, [T].

    Raises:
        ConfigError: ``importance`` is unknown.
    """
    if importance not in IMPORTANCE_MODES:
        what = f"got importance mode {importance!r}, expected one of {', '.join(IMPORTANCE_MODES)}"
        raise ConfigError(what, keys=("gkd.importance",))
    if importance == "none":
        return torch.ones_like(logp_T)
    ratio_T = probability_ratio(logp_T.detach(), sampling_logp_T)
    return ratio_T.clamp(max=cap) if importance == "truncate" else ratio_T.where(ratio_T <= cap, 0)


def probability_ratio(logp_T: Tensor, sampling_logp_T: Tensor) -> Tensor:
    """Return q(y) / q_sampling(y) at each position, limited to [exp(-20), exp(20)], [T]."""
    return (logp_T - sampling_logp_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def with_gradient(value_T: Tensor, surrogate_T: Tensor) -> Tensor:
    """Return ``value_T`` with the gradient of ``surrogate_T``, [T]."""
    return value_T.detach() + (surrogate_T - surrogate_T.detach())
