"""Difference between the log-probabilities of sampled tokens in the rollout engine and in the trainer.

Shape suffix: T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RolloutMismatch:
    """Measures of the difference at each sampled token; 0 at other tokens. None has a gradient.

    Attributes:
        probs_diff_T: Absolute difference of the two probabilities of the sampled token.
        kl_T: Estimate of KL(rollout || trainer) from one sample: ``exp(d) - 1 - d`` with ``d`` the trainer's
            log-probability less the rollout's, in nats. It is unbiased and at least 0 (Schulman 2020, Approximating KL
            Divergence, k3).
    """

    probs_diff_T: Tensor
    kl_T: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, trainer_logps_T: Tensor, rollout_logps_T: Tensor, is_sampled_T: Tensor) -> RolloutMismatch:
        """Compare log-probabilities at temperature 1.

        Args:
            trainer_logps_T: Log-probabilities of the response tokens in the trainer.
            rollout_logps_T: Log-probabilities in the engine that sampled them.
            is_sampled_T: True for tokens that the engine sampled.
        """
        difference_T = trainer_logps_T - rollout_logps_T
        return cls(
            probs_diff_T=(trainer_logps_T.exp() - rollout_logps_T.exp()).abs().where(is_sampled_T, 0),
            kl_T=(difference_T.expm1() - difference_T).where(is_sampled_T, 0),
        )

    def max_probs_diff(self) -> Tensor:
        """Return the largest difference of probabilities; 0 without tokens."""
        diff_T = self.probs_diff_T.double()
        return diff_T.max() if len(diff_T) else diff_T.new_zeros(())
