from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_gkd.data.samples import InsertedTokens, Prompt, Response, Sample, TeacherTopK
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.rewards.advantages import with_advantages, with_baselines

NO_IDS = np.zeros(0, np.int32)


def sample(
    uid: int,
    reward: float | None = None,
    *,
    token_rewards: list[float] | None = None,
    n_unscored: int = 0,
    is_reference: bool = False,
) -> Sample:
    """Return a sample.

    ``token_rewards``: log-probability by the teacher minus that by the student, for each scored token. Then come
    ``n_unscored`` tokens without a teacher.
    """
    n_scored = len(token_rewards or [])
    length = n_scored + n_unscored
    ids = np.zeros(length, np.int32)
    logprobs = -np.arange(length, dtype=np.float32)
    teacher = TeacherTopK.absent(length)
    teacher.ids_TK[:n_scored] = 0
    teacher.sampled_logps_T[:n_scored] = logprobs[:n_scored] + np.array(token_rewards or [], np.float32)
    response = Response(
        uid=uid, ids=ids, logprobs=logprobs, finish_reason="stop", weights_version=0, versions_T=np.zeros(length)
    )
    prompt = Prompt(uid=uid, ids=NO_IDS, row=0, reference_ids=ids if is_reference else None)
    return Sample(prompt=prompt, response=response, teacher=teacher, reward=reward)


groups = st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=5)


class TestWithAdvantages:
    @settings(max_examples=100, deadline=None)
    @given(groups=groups, by_std=st.booleans(), seed=st.integers(0, 99))
    def test_shuffled_batch_has_zero_sum_and_requested_deviation_per_group(
        self, groups: list[list[float]], by_std: bool, seed: int
    ) -> None:
        batch = [sample(3 * index + i, reward) for index, group in enumerate(groups) for i, reward in enumerate(group)]
        random.Random(seed).shuffle(batch)
        prepared = {s.prompt.uid: s.advantage for s in with_advantages(batch, 3, by_std=by_std)}
        for index, group in enumerate(groups):
            rewards, advantages = np.array(group), np.array([prepared[3 * index + i] for i in range(3)])
            std = rewards.std(ddof=1)
            if std <= 1e-9 * np.abs(rewards).max():
                assert (advantages == 0).all()
            else:
                expected = (rewards - rewards.mean()) / (std + 1e-6 if by_std else 1.0)
                assert advantages == pytest.approx(expected, abs=1e-9)
                assert advantages.sum() == pytest.approx(0, abs=1e-6)

    def test_rewards_equal_up_to_rounding_have_advantage_zero(self) -> None:
        equal = [sample(0, 0.1 + 0.2), sample(1, 0.3), sample(2, 0.3)]
        assert [s.advantage for s in with_advantages(equal, 3, by_std=True)] == [0, 0, 0]

    def test_single_response_has_advantage_zero(self) -> None:
        assert with_advantages([sample(5, 7.0)], 1, by_std=True)[0].advantage == 0

    def test_agrees_with_verl(self) -> None:
        """``(r - mean) / (std + 1e-6)`` with the sample deviation, as ``compute_grpo_outcome_advantage`` of verl."""
        groups = torch.tensor([[0.0, 1.0, 1.0], [-2.0, 0.5, 7.0], [0.0, 0.0, 1e-3]], dtype=torch.float64)
        expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        batch = [sample(uid, reward) for uid, reward in enumerate(groups.flatten().tolist())]
        found = [s.advantage for s in with_advantages(batch, 3, by_std=True)]
        assert found == pytest.approx(expected.flatten().tolist(), rel=1e-12)

    def test_rewards_that_differ_by_noise_have_no_advantage(self) -> None:
        noise = [sample(0, 0.0), sample(1, 1e-12), sample(2, 3e-12)]
        assert all(abs(s.advantage) < 1e-5 for s in with_advantages(noise, 3, by_std=True))

    def test_response_without_reward_has_no_advantage_and_no_part_in_its_group(self) -> None:
        groups = [sample(0, 1.0), sample(1), sample(2, 3.0), sample(3), sample(4), sample(5)]
        found = [one.advantage for one in with_advantages(groups, 3, by_std=False)]
        assert found == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def of_conversation(
    uid: int, n_tokens: list[int], turn_rewards: tuple[float, ...] = (), reward: float | None = None
) -> Sample:
    """Return a sequence of a conversation with tokens between its turns, of ``n_tokens`` each."""
    n_all = max(len(n_tokens), len(turn_rewards))
    one = sample(uid, sum(turn_rewards) if turn_rewards else reward, n_unscored=sum(n_tokens))
    before_N = np.cumsum(n_tokens)[:-1].astype(np.int32)
    inserted = InsertedTokens(ids_N=np.zeros_like(before_N), before_N=before_N) if len(before_N) else None
    transcript = Transcript(messages=[], n_turns=n_all, end="stop")
    response = replace(one.response, inserted=inserted, transcript=transcript)
    return replace(one, response=response, turn_rewards=turn_rewards)


class TestTurns:
    def test_advantage_of_a_turn_is_that_of_its_return(self) -> None:
        group = [of_conversation(0, [1, 2], (1.0, 2.0)), of_conversation(1, [2, 1], (0.0, 1.0))]
        found = [one.advantage for one in with_advantages(group, 2, by_std=False)]
        # Returns: 3, 2 and 1, 1.
        np.testing.assert_allclose(found[0], [1.0, 0.5, 0.5])
        np.testing.assert_allclose(found[1], [-1.0, -1.0, -0.5])

    def test_conversation_that_has_ended_counts_with_its_last_return(self) -> None:
        group = [of_conversation(0, [1, 1, 1], (1.0, 1.0, 2.0)), of_conversation(1, [1], (1.0,))]
        found = [one.advantage for one in with_advantages(group, 2, by_std=False)]
        np.testing.assert_allclose(found[0], [1.5, 1.0, 0.5])  # returns: 4, 3, 2 and 1
        assert found[1] == -1.5

    def test_equal_final_rewards_give_longer_conversations_no_advantage(self) -> None:
        group = [of_conversation(0, [1, 1, 1], (0.0, 0.0, 1.0)), of_conversation(1, [1, 1], (0.0, 1.0))]
        assert all(not np.any(one.advantage) for one in with_advantages(group, 2, by_std=True))

    def test_conversation_without_others_has_no_advantage(self) -> None:
        group = [of_conversation(0, [1, 1], (1.0, 1.0)), of_conversation(1, [1, 1])]
        assert all(not np.any(one.advantage) for one in with_advantages(group, 2, by_std=True))

    def test_reward_of_a_whole_conversation_is_the_return_of_each_turn(self) -> None:
        group = [of_conversation(0, [1, 1], (0.0, 2.0)), of_conversation(1, [1, 1], reward=1.0)]
        found = [one.advantage for one in with_advantages(group, 2, by_std=False)]
        np.testing.assert_allclose(found[0], [0.5, 0.5])
        np.testing.assert_allclose(found[1], [-0.5, -0.5])

    def test_parts_of_a_conversation_have_the_turns_in_order(self) -> None:
        parts = [of_conversation(0, [1, 2], (1.0, 2.0, 4.0)), of_conversation(0, [2], (1.0, 2.0, 4.0))]
        other = of_conversation(1, [1, 1, 1], (0.0, 0.0, 0.0))
        found = [one.advantage for one in with_advantages([*parts, other], 2, by_std=False)]
        np.testing.assert_allclose(found[0], [3.5, 3.0, 3.0])
        np.testing.assert_allclose(found[1], [2.0, 2.0])

    def test_conversation_of_several_parts_counts_once(self) -> None:
        """Neither the mean of the rewards nor a baseline contains a conversation more often, or itself."""
        parts = [sample(0, 1.0, token_rewards=[1.0]), sample(0, 1.0, token_rewards=[9.0])]
        group = [*parts, sample(1, 2.0, token_rewards=[3.0, 5.0])]
        assert [one.advantage for one in with_advantages(group, 2, by_std=False)] == [-0.5, -0.5, 0.5]
        assert [one.baseline for one in with_baselines(group, 2)] == [4.0, 4.0, 5.0]


class TestWithBaselines:
    @pytest.mark.parametrize("others", [[1.0, 1.0], [1.0, 1.0 + 1e-7], [1.0, 1.0 + 1e-6], [1.0, 1.01], [0.9, 1.1]])
    def test_similar_token_rewards_give_at_most_tenfold_weight(self, others: list[float]) -> None:
        first = with_baselines([sample(0, token_rewards=[2.0]), sample(1, token_rewards=others)], 2)[0]
        assert (2.0 - first.baseline) / first.scale == pytest.approx(10, rel=0.01)

    def test_scale_grows_continuously_from_its_lower_bound(self) -> None:
        scales = [
            with_baselines([sample(0, token_rewards=[2.0]), sample(1, token_rewards=[-s, s])], 2)[0].scale
            for s in (0.099, 0.101, 3)
        ]
        assert scales == pytest.approx([0.1, 0.101, 3], rel=1e-5)

    def test_statistics_are_over_tokens_of_other_responses_to_the_prompt(self) -> None:
        rewards = [[1.0, 2.0, 3.0], [], [5.0], [5.0] * 4]
        prepared = with_baselines([sample(uid, token_rewards=r) for uid, r in enumerate(rewards)], 3)
        tokens = np.array([1.0, 2.0, 3.0, 5.0])
        assert [s.baseline for s in prepared[:3]] == pytest.approx([5.0, tokens.mean(), 2.0])
        assert [s.scale for s in prepared[:3]] == pytest.approx([1.0, tokens.std(), tokens[:3].std()])
        assert (prepared[3].baseline, prepared[3].scale) == (0.0, 1.0)  # the only response to its prompt

    @settings(max_examples=50, deadline=None)
    @given(
        rewards=st.lists(st.lists(st.floats(-3, 3, width=16), max_size=5), min_size=2, max_size=4),
        n_unscored=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    )
    def test_unscored_tokens_change_no_statistic(self, rewards: list[list[float]], n_unscored: list[int]) -> None:
        """``gkd.max_loss_position`` leaves tokens without a teacher, whose log-probability is stored as 0."""
        scored = with_baselines([sample(uid, token_rewards=r) for uid, r in enumerate(rewards)], 4)
        padded = with_baselines(
            [sample(uid, token_rewards=r, n_unscored=n_unscored[uid]) for uid, r in enumerate(rewards)], 4
        )
        assert [(s.baseline, s.scale) for s in padded] == [(s.baseline, s.scale) for s in scored]

    def test_single_scored_token_of_the_others_has_scale_one(self) -> None:
        first = with_baselines([sample(0, token_rewards=[2.0]), sample(1, token_rewards=[0.5], n_unscored=9)], 2)[0]
        assert (first.baseline, first.scale) == (0.5, 1.0)


def test_reference_responses_are_unchanged_and_order_is_kept() -> None:
    batch = [sample(0, 1.0), sample(2, is_reference=True), sample(1, 3.0)]
    prepared = with_advantages(batch, 2, by_std=False)
    assert [(s.prompt.uid, s.advantage) for s in prepared] == [(0, -1.0), (2, 0.0), (1, 1.0)]
    assert with_baselines(batch, 2)[1] == batch[1]


def test_skipped_sample_is_in_no_baseline_but_has_an_advantage() -> None:
    skipped = replace(sample(1, 4.0, token_rewards=[-50.0] * 3), is_skipped=True)
    batch = [sample(0, 1.0, token_rewards=[1.0, 2.0]), skipped, sample(2, 1.0, token_rewards=[5.0, 6.0])]
    prepared = with_baselines(batch, 3)
    assert [s.baseline for s in prepared] == [5.5, 0.0, 1.5] and prepared[1] == skipped
    assert [s.advantage for s in with_advantages(batch, 3, by_std=False)] == [-1.0, 2.0, -1.0]
