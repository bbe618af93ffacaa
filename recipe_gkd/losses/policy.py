"""The policy loss on a reward: GRPO's clipped surrogate at each sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from recipe_gkd.losses.sampled_token import probability_ratio


def grpo_loss(
    logp_T: Tensor, sampling_logp_T: Tensor, advantage_T: Tensor, *, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, Tensor]:
    """``-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)``, w = q / q_sampling, ``[T]``; and whether it was clipped.

    PPO's surrogate (Schulman et al. 2017, arXiv 1707.06347) with the advantages of GRPO (Shao et al. 2024, arXiv
    2402.03300) and separate bounds (Yu et al. 2025, DAPO, arXiv 2503.14476); for A < 0 at most ``-clip_c A`` (Ye et al.
    2020, dual clip, arXiv 1912.09729). Where it is clipped there is no gradient.
    """
    ratio_T = probability_ratio(logp_T, sampling_logp_T)
    free_T, bounded_T = -advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = free_T.maximum(bounded_T)
    loss_T = torch.where(advantage_T < 0, loss_T.minimum(-clip_c * advantage_T), loss_T)
    return loss_T, loss_T.detach() != free_T.detach()
