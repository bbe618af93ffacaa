"""Advantages and baselines of the responses to one prompt, from their rewards. Pure functions on samples.

A group is the samples with the same ``uid // responses_per_prompt``. Reference responses belong to no group and are
returned unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recipe_gkd.config.conditions import uses_group_baseline
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Sample

EQUAL_REWARDS_RTOL = 1e-9
"""Rewards are equal except for rounding if their standard deviation is at most this fraction of the largest reward."""
STD_EPSILON = 1e-6
"""Added to the standard deviation of rewards before the division, so that noise gives no advantage. The value is that
of verl (``compute_grpo_outcome_advantage``); TRL's ``GRPOTrainer`` adds 1e-4."""
MIN_SCALE_NATS = 0.1
"""Lower bound of the standard deviation of ``log p - log q`` by which the baseline ``group`` divides. Smaller
deviations are mostly rounding: bfloat16 rounds logits of 16 and more by up to 0.06. So the weight of a token grows at
most tenfold."""


def with_group_statistics(samples: Sequence[Sample], gkd: GkdConfig, responses_per_prompt: int) -> list[Sample]:
    """Return the samples with the advantages and baselines that the objective needs.

    Call it before the batch is divided among ranks, because that may separate the samples of a group.

    Args:
        samples: All samples of a batch.
        gkd: Configuration of the objective.
        responses_per_prompt: Number of responses per prompt.
    """
    samples = list(samples)
    if gkd.use_rl_loss:
        samples = with_advantages(samples, responses_per_prompt, by_std=gkd.norm_adv_by_std)
    if uses_group_baseline(gkd):
        samples = with_baselines(samples, responses_per_prompt)
    return samples


def with_advantages(samples: Sequence[Sample], responses_per_prompt: int, *, by_std: bool) -> list[Sample]:
    """Return the samples with GRPO's advantages (Shao et al. 2024, arXiv:2402.03300).

    The advantage is the reward minus the mean of the group. With ``by_std`` it is divided by the sample standard
    deviation of the group (n - 1 in the denominator) plus :data:`STD_EPSILON`. Equal rewards have advantage 0.
    A response without a reward (``custom_reward_function.on_failure=skip``) has advantage 0 too, and the statistics of
    its group cover the other responses.

    Args:
        samples: All samples of a batch.
        responses_per_prompt: Number of responses per prompt.
        by_std: True to divide by the standard deviation.
    """
    prepared = list(samples)
    for group in _groups(samples, responses_per_prompt):
        rewarded = {index: reward for index in group if (reward := samples[index].reward) is not None}
        if not rewarded:
            continue
        indices, rewards = list(rewarded), np.array(list(rewarded.values()))
        advantages = rewards - rewards.mean()
        std = rewards.std(ddof=1) if len(indices) > 1 else 0.0
        if std <= EQUAL_REWARDS_RTOL * np.abs(rewards).max():
            advantages = np.zeros(len(indices))
        elif by_std:
            advantages /= std + STD_EPSILON
        for index, advantage in zip(indices, advantages, strict=True):
            prepared[index] = replace(samples[index], advantage=float(advantage))
    return prepared


def with_baselines(samples: Sequence[Sample], responses_per_prompt: int) -> list[Sample]:
    """Return the samples with the mean and the standard deviation of the ``k1`` token reward of their group.

    The token reward is ``log p - log q`` of a sampled token. The statistics of a response are over the tokens of the
    *other* responses to its prompt (leave-one-out): a response's own tokens depend on each other, and would bias its
    baseline. Only scored tokens count (``gkd.max_loss_position``): the teacher's log-probability of others is unknown.
    The standard deviation is at least :data:`MIN_SCALE_NATS`, and 1 if the others have a single scored token. Samples
    without teacher scores are left out and returned unchanged.

    Args:
        samples: All samples of a batch.
        responses_per_prompt: Number of responses per prompt.
    """
    prepared = list(samples)
    for group in _groups(samples, responses_per_prompt):
        indices = [index for index in group if not samples[index].is_skipped]
        rewards = {index: _token_rewards(samples[index]) for index in indices}
        for index in indices:
            others = np.concatenate([np.zeros(0), *(rewards[other] for other in indices if other != index)])
            if len(others):
                scale = max(float(others.std()), MIN_SCALE_NATS) if len(others) > 1 else 1.0
                prepared[index] = replace(samples[index], baseline=float(others.mean()), scale=scale)
    return prepared


def _token_rewards(sample: Sample) -> np.ndarray:
    """Return ``log p - log q`` of each scored token, float64 [R]."""
    scored_T = sample.teacher.is_scored_T
    teacher_R, student_R = sample.teacher.sampled_logps_T[scored_T], sample.response.logprobs[scored_T]
    return np.subtract(teacher_R, student_R, dtype=np.float64)


def _groups(samples: Sequence[Sample], responses_per_prompt: int) -> list[list[int]]:
    """Return the indices of the samples of each group."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if not sample.is_reference:
            groups.setdefault(sample.prompt.uid // responses_per_prompt, []).append(index)
    return list(groups.values())
