"""Policy loss on a reward: the clipped surrogate of GRPO at each sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from recipe_gkd.losses.sampled_token import probability_ratio


def grpo_loss(
    logp_T: Tensor, sampling_logp_T: Tensor, advantage_T: Tensor, *, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate ``-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)`` with w = q / q_sampling.

    The surrogate is PPO's (Schulman et al. 2017, arXiv:1707.06347), with the advantages of GRPO (Shao et al. 2024,
    arXiv:2402.03300) and separate bounds (Yu et al. 2025, DAPO, arXiv:2503.14476). For A < 0 it is at most
    ``-clip_c * A`` (Ye et al. 2020, dual clip, arXiv:1912.09729). A clipped token has no gradient.

    Args:
        logp_T: Log-probability of the sampled token under the student. Differentiable.
        sampling_logp_T: Log-probability of the sampled token under the weights that sampled it.
        advantage_T: Advantage A of the token's response.
        clip_low: Lower bound of the ratio is 1 - this.
        clip_high: Upper bound of the ratio is 1 + this.
        clip_c: Bound of the ratio for A < 0.

    Returns:
        Loss [T], and a bool mask [T] of the clipped tokens.
    """
    ratio_T = probability_ratio(logp_T, sampling_logp_T)
    unclipped_T, clipped_T = -advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = unclipped_T.maximum(clipped_T)
    loss_T = torch.where(advantage_T < 0, loss_T.minimum(-clip_c * advantage_T), loss_T)
    return loss_T, loss_T.detach() != unclipped_T.detach()
