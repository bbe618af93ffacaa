"""The clipped surrogate of GRPO in each of its regions."""

from __future__ import annotations

import math

import pytest
import torch

from recipe_gkd.losses.policy import grpo_loss

LOW, HIGH, C = 0.2, 0.3, 3.0


@pytest.mark.parametrize(
    "ratio, advantage, loss, has_gradient",
    [
        (1.0, 2.0, -2.0, True),
        (1.0, -2.0, 2.0, True),
        (1.25, 2.0, -2.5, True),  # inside the bounds
        (0.85, -2.0, 1.7, True),
        (1.5, 2.0, -2.6, False),  # beyond the upper bound, in the direction of the advantage
        (0.5, -2.0, 1.6, False),  # beyond the lower bound, in the direction of the advantage
        (0.5, 2.0, -1.0, True),  # against the direction of the advantage: not clipped
        (1.5, -2.0, 3.0, True),
        (2.9, -2.0, 5.8, True),
        (3.1, -2.0, 6.0, False),  # dual clip: bounds the weight of one response in the batch
        (1.5, 0.0, 0.0, True),  # the gradient is 0 without clipping
    ],
)
def test_grpo_loss_in_region_has_expected_value_and_gradient(
    ratio: float, advantage: float, loss: float, has_gradient: bool
) -> None:
    logp_T = torch.tensor([math.log(ratio) - 3], dtype=torch.float64, requires_grad=True)
    sampling_T, advantage_T = torch.tensor([-3.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss_T, clipped_T = grpo_loss(logp_T, sampling_T, advantage_T, clip_low=LOW, clip_high=HIGH, clip_c=C)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss)
    assert logp_T.grad is not None
    assert logp_T.grad.item() == pytest.approx(-advantage * ratio if has_gradient else 0.0)
    assert clipped_T.tolist() == [not has_gradient]


def test_grpo_loss_with_overflowing_ratio_is_finite() -> None:
    logp_T = torch.tensor([0.0, -1e4], requires_grad=True)
    loss_T, _ = grpo_loss(
        logp_T, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]), clip_low=LOW, clip_high=HIGH, clip_c=C
    )
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and logp_T.grad is not None and logp_T.grad.isfinite().all()
