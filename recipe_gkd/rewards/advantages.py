"""What the rewards of a group of answers to one prompt say of each of them. Pure: samples in, samples out.

A group is the samples whose ``uid // responses_per_prompt`` is the same; given answers are in none and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Sample

EPS = 1e-9
"""Rewards whose deviation is not above this share of the largest are equal but for rounding."""
STD_EPSILON = 1e-6
"""Added to a deviation of rewards before it divides, so that rewards that differ by noise only have no advantage: as in
verl (``compute_grpo_outcome_advantage``; TRL's ``GRPOTrainer`` adds 1e-4)."""
MIN_SCALE_NATS = 0.1
"""Lower bound of the deviation of ``log p - log q`` by which the baseline ``group`` divides. Smaller deviations are
mostly rounding: bfloat16 rounds logits of 16 and more by up to 0.06. So no token is weighted more than tenfold."""


def with_group_statistics(samples: Sequence[Sample], gkd: GkdConfig, responses_per_prompt: int) -> list[Sample]:
    """What the objective needs before the batch is divided among ranks, which may part a group."""
    samples = list(samples)
    if gkd.use_rl_loss:
        samples = with_advantages(samples, responses_per_prompt, by_std=gkd.norm_adv_by_std)
    if gkd.distill_loss_type == "k1" and gkd.baseline == "group":
        samples = with_baselines(samples, responses_per_prompt)
    return samples


def with_advantages(samples: Sequence[Sample], responses_per_prompt: int, *, by_std: bool) -> list[Sample]:
    """Set GRPO's advantages (Shao et al. 2024, arXiv:2402.03300): reward less the group's mean, and by its deviation.

    The deviation is that of a sample, over n - 1, plus :data:`STD_EPSILON`, as in other implementations. Equal rewards
    have advantage 0. Raises ValueError if a sampled answer has no reward.
    """
    prepared = list(samples)
    for places in _groups(samples, responses_per_prompt):
        rewards = np.array([_reward(samples[place]) for place in places])
        advantages = rewards - rewards.mean()
        std = rewards.std(ddof=1) if len(places) > 1 else 0.0
        if std <= EPS * np.abs(rewards).max():
            advantages = np.zeros(len(places))
        elif by_std:
            advantages /= std + STD_EPSILON
        for place, advantage in zip(places, advantages, strict=True):
            prepared[place] = replace(samples[place], advantage=float(advantage))
    return prepared


def with_baselines(samples: Sequence[Sample], responses_per_prompt: int) -> list[Sample]:
    """Set mean and deviation of the rewards of ``k1``, log p - log q of each sampled token, over the tokens of the
    *other* answers to the same prompt: an answer's own tokens depend on each other, and would bias its baseline.

    The deviation is at least :data:`MIN_SCALE_NATS`, and 1 if the others have a single token. An answer that the
    teacher gave no opinion on counts for nothing, and stays as it is.
    """
    prepared = list(samples)
    for group in _groups(samples, responses_per_prompt):
        places = [place for place in group if not samples[place].is_skipped]
        rewards = {
            place: np.subtract(samples[place].teacher.sampled_logps_T, samples[place].response.logprobs, dtype=np.float64)
            for place in places
        }
        for place in places:
            others = np.concatenate([np.zeros(0), *(rewards[other] for other in places if other != place)])
            if len(others):
                scale = max(float(others.std()), MIN_SCALE_NATS) if len(others) > 1 else 1.0
                prepared[place] = replace(samples[place], baseline=float(others.mean()), scale=scale)
    return prepared


def _groups(samples: Sequence[Sample], responses_per_prompt: int) -> list[list[int]]:
    """The places of each group's samples."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        if not sample.is_reference:
            groups.setdefault(sample.prompt.uid // responses_per_prompt, []).append(place)
    return list(groups.values())


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.prompt.uid} has no reward, from which its advantage would follow")
    return sample.reward
