"""Advantages and baselines of the responses to one prompt, from their rewards. Pure functions on samples.

A group is the samples with the same ``uid // responses_per_prompt``. Reference responses belong to no group and are
returned unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from recipe_gkd.config.conditions import uses_group_baseline
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.parts import turns_T
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

    If the turns of a conversation of the group have rewards, each turn has its own advantage: its return, which is the
    sum of the rewards from this turn on, takes the place of the reward, and the statistics are over the same turn of
    the conversations. One that has ended before counts with the return of its last turn.

    Args:
        samples: All samples of a batch.
        responses_per_prompt: Number of responses per prompt.
        by_std: True to divide by the standard deviation.
    """
    prepared = list(samples)
    for group in _groups(samples, responses_per_prompt):
        rewarded = [index for index in group if samples[index].reward is not None]
        returns = _returns({samples[index].prompt.uid: samples[index] for index in rewarded})
        advantages = {
            uid: np.array([_advantage(returns, uid, turn, by_std=by_std) for turn in range(len(of_turns))])
            for uid, of_turns in returns.items()
        }
        n_turns_before: dict[int, int] = {}  # in the parts of a conversation before a sample
        for index in rewarded:
            sample = samples[index]
            uid = sample.prompt.uid
            turn_T = turns_T(sample.response) + n_turns_before.get(uid, 0)
            if len(advantages[uid]) == 1:
                prepared[index] = replace(sample, advantage=float(advantages[uid][0]))
            elif len(turn_T):
                prepared[index] = replace(sample, advantage=advantages[uid][turn_T].astype(np.float32))
                n_turns_before[uid] = int(turn_T[-1]) + 1
    return prepared


def _returns(responses: Mapping[int, Sample]) -> dict[int, np.ndarray]:
    """Return the return of each turn of each response, float64; of one turn if no turns of the group have rewards.

    Args:
        responses: A sample of each response, by uid.
    """
    has_turns = any(sample.turn_rewards for sample in responses.values())
    found = {}
    for uid, sample in responses.items():
        transcript = sample.response.transcript
        n_turns = transcript.n_turns if has_turns and transcript is not None else 1
        rewards = sample.turn_rewards or (*([0.0] * (n_turns - 1)), sample.reward or 0.0)
        found[uid] = np.cumsum(np.array(rewards, np.float64)[::-1])[::-1]
    return found


def _advantage(returns: Mapping[int, np.ndarray], uid: int, turn: int, *, by_std: bool) -> float:
    """Return the advantage of a turn among the turns of the group."""
    values = np.array([of_turns[min(turn, len(of_turns) - 1)] for of_turns in returns.values()])
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    if std <= EQUAL_REWARDS_RTOL * np.abs(values).max():
        return 0.0
    return float((returns[uid][turn] - values.mean()) / (std + STD_EPSILON if by_std else 1.0))


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
        uid_of = {index: samples[index].prompt.uid for index in indices}
        for index in indices:
            others = np.concatenate(
                [np.zeros(0), *(rewards[other] for other in indices if uid_of[other] != uid_of[index])]
            )
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
