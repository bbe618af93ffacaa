"""Difference between the log-probabilities of sampled tokens in the rollout engine and in the trainer.

Shape suffix: T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipe_gkd.losses.sampled_token import MAX_LOG_RATIO, k3


@dataclass(frozen=True, kw_only=True)
class RolloutMismatch:
    """Measures of the difference at each sampled token; 0 at other tokens. None has a gradient.

    ``d`` is the trainer's log-probability less the rollout's, in nats.

    Attributes:
        probs_diff_T: Absolute difference of the two probabilities of the sampled token.
        kl_T: Estimate of KL(rollout || trainer) from one sample: ``exp(d) - 1 - d``, in nats. It is unbiased and at
            least 0 (Schulman 2020, Approximating KL Divergence, k3). Above ``d`` = 20 it continues as its tangent, as
            the loss ``k3``.
        kl_capped_T: True for the tokens above 20, bool.
        current_diff_T: Absolute value of ``d``, at most 20 nats, at tokens that the trainer's present weights sampled.
            It contains no policy lag: it differs from 0 by rounding, or because the engine computes another model.
    """

    probs_diff_T: Tensor
    kl_T: Tensor
    kl_capped_T: Tensor
    current_diff_T: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, trainer_logps_T: Tensor, rollout_logps_T: Tensor, is_sampled_T: Tensor, is_current_T: Tensor
    ) -> RolloutMismatch:
        """Compare log-probabilities at temperature 1.

        Args:
            trainer_logps_T: Log-probabilities of the response tokens in the trainer.
            rollout_logps_T: Log-probabilities in the engine that sampled them.
            is_sampled_T: True for tokens that the engine sampled.
            is_current_T: True for tokens that the engine sampled with the trainer's present weights.
        """
        difference_T = trainer_logps_T - rollout_logps_T
        return cls(
            probs_diff_T=(trainer_logps_T.exp() - rollout_logps_T.exp()).abs().where(is_sampled_T, 0),
            kl_T=k3(rollout_logps_T, trainer_logps_T).where(is_sampled_T, 0),
            kl_capped_T=(difference_T > MAX_LOG_RATIO) & is_sampled_T,
            current_diff_T=difference_T.abs().clamp(max=MAX_LOG_RATIO).where(is_current_T, 0),
        )

    def max_probs_diff(self) -> Tensor:
        """Return the largest difference of probabilities; 0 without tokens."""
        diff_T = self.probs_diff_T.double()
        return diff_T.max() if len(diff_T) else diff_T.new_zeros(())
