"""Difference between the log-probabilities of the rollout engine and of the trainer."""

from __future__ import annotations

import math

import pytest
import torch

from recipe_gkd.losses.rollout_mismatch import RolloutMismatch

ALL = torch.ones(3, dtype=torch.bool)


def test_rollout_mismatch_equal_logps_is_zero() -> None:
    logps_T = torch.tensor([-0.1, -5.0, -30.0])
    mismatch = RolloutMismatch.of(logps_T, logps_T, ALL, ALL)
    assert mismatch.kl_T.tolist() == mismatch.probs_diff_T.tolist() == [0.0, 0.0, 0.0]
    assert mismatch.current_diff_T.tolist() == [0.0, 0.0, 0.0]
    assert mismatch.max_probs_diff() == 0


def test_rollout_mismatch_hand_computed_values_without_reference_tokens() -> None:
    trainer_T = torch.tensor([math.log(0.5), math.log(0.1), -1.0], requires_grad=True)
    rollout_T = torch.tensor([math.log(0.25), math.log(0.2), 0.0])
    sampled_T = torch.tensor([True, True, False])
    mismatch = RolloutMismatch.of(trainer_T, rollout_T, sampled_T, torch.tensor([False, True, False]))
    assert mismatch.probs_diff_T.tolist() == pytest.approx([0.25, 0.1, 0.0])
    assert mismatch.kl_T.tolist() == pytest.approx([2 - 1 - math.log(2), 0.5 - 1 + math.log(2), 0.0])
    assert mismatch.max_probs_diff() == pytest.approx(0.25)
    assert mismatch.current_diff_T.tolist() == pytest.approx([0.0, math.log(2), 0.0])
    assert not mismatch.kl_T.requires_grad


def test_rollout_mismatch_expected_kl_is_the_kl_divergence() -> None:
    rollout_V = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    trainer_V = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    mismatch = RolloutMismatch.of(trainer_V.log(), rollout_V.log(), ALL, ALL)
    kl = (rollout_V * (rollout_V / trainer_V).log()).sum()
    torch.testing.assert_close((rollout_V * mismatch.kl_T).sum(), kl)


def test_rollout_mismatch_no_tokens_has_maximum_zero() -> None:
    empty = torch.zeros(0)
    assert RolloutMismatch.of(empty, empty, empty.bool(), empty.bool()).max_probs_diff() == 0


def test_rollout_mismatch_extreme_ratios_are_finite_and_counted() -> None:
    """Beyond 88 nats the exponential of a float32 is infinite, and with it the mean over the batch."""
    trainer_T, rollout_T = torch.tensor([-0.1, -200.0, -1.0]), torch.tensor([-100.0, -0.1, -1.0])
    mismatch = RolloutMismatch.of(trainer_T, rollout_T, ALL, ALL)
    tangent = math.exp(20) * (99.9 - 20) + math.exp(20) - 1 - 99.9
    assert mismatch.kl_T.tolist() == pytest.approx([tangent, -1 + 199.9, 0.0], rel=1e-5)
    assert mismatch.kl_capped_T.tolist() == [True, False, False]
    assert mismatch.current_diff_T.tolist() == [20.0, 20.0, 0.0]
