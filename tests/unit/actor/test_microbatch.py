"""Dividing and packing a batch: nothing is lost, nothing is doubled, and every row is the row it should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe_gkd.actor.loss_terms import GlobalDenominators, members
from recipe_gkd.actor.microbatch import bucket_by_length, micro_batches, pack, shard_batch
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.errors import DataError
from tests._support.tiny_models import TOP_K, make_sample, make_samples

SAMPLES = make_samples(40)


def uids(samples: list[Sample]) -> list[int]:
    return [sample.prompt.uid for sample in samples]


def tokens(samples: list[Sample]) -> int:
    return sum(sample.n_tokens - 1 for sample in samples if len(sample.response.ids))


@pytest.mark.parametrize("dp_size", [1, 2, 3, 50])
def test_every_sample_is_in_one_shard_in_the_order_of_the_batch(dp_size: int) -> None:
    shards = shard_batch(SAMPLES, dp_size)
    assert len(shards) == dp_size
    assert sorted(uid for shard in shards for uid in uids(shard)) == uids(SAMPLES)
    assert all(uids(shard) == sorted(uids(shard)) for shard in shards)


def test_shards_have_nearly_equal_numbers_of_tokens() -> None:
    counts = [tokens(shard) for shard in shard_batch(SAMPLES, 4)]
    assert max(counts) - min(counts) <= max(sample.n_tokens for sample in SAMPLES)
    assert max(counts) <= 1.05 * sum(counts) / 4


def test_dynamic_micro_batches_stay_below_the_limit_and_lose_nothing() -> None:
    groups = micro_batches(SAMPLES, micro_batch_size=1, max_token_len=50)
    with_response = [sample for sample in SAMPLES if len(sample.response.ids)]
    assert sorted(uid for group in groups for uid in uids(group)) == uids(with_response)
    assert all(tokens(group) <= 50 for group in groups)
    assert len(groups) <= 1.25 * tokens(SAMPLES) / 50 + 1


def test_sample_longer_than_the_limit_is_alone() -> None:
    groups = micro_batches(SAMPLES, micro_batch_size=1, max_token_len=10)
    long = [group for group in groups if tokens(group) > 10]
    assert long and all(len(group) == 1 for group in long)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_micro_batches_by_number_of_samples(size: int) -> None:
    groups = micro_batches(SAMPLES, micro_batch_size=size, max_token_len=None)
    with_response = [s for s in SAMPLES if len(s.response.ids)]
    assert uids([s for group in groups for s in group]) == uids(with_response)
    assert [len(group) for group in groups[:-1]] == [size] * (len(groups) - 1)


def test_row_before_a_response_token_carries_the_teachers_opinion_on_it() -> None:
    samples = [sample for sample in SAMPLES if len(sample.response.ids)]
    packed = pack(samples, multiple_of=4)
    start, row = 0, 0
    for sample in samples:
        full = sample.token_ids
        assert packed.token_ids_N[start : start + len(full) - 1].tolist() == full[:-1].tolist()
        for t, position in enumerate(range(len(sample.prompt.ids), len(full))):
            assert packed.loss_rows_T[row] == start + position - 1
            assert packed.ids_TK[row].tolist() == sample.teacher.ids_TK[t].tolist()
            assert packed.logps_TK[row].tolist() == sample.teacher.logps_TK[t].tolist()
            assert packed.uids_T[row] == sample.prompt.uid
            row += 1
        start += len(full) - 1
    assert row == len(packed.loss_rows_T)
    assert len(packed.token_ids_N) == sum(packed.lengths) == -(-start // 4) * 4
    assert packed.position_ids_N[packed.lengths[0]] == 0


def test_empty_micro_batch_has_a_row_but_no_loss() -> None:
    packed = pack([], multiple_of=2)
    assert packed.lengths == [2] and len(packed.loss_rows_T) == 0


def test_shorter_teacher_top_k_is_filled_with_absent_entries() -> None:
    wide = next(sample for sample in SAMPLES if len(sample.response.ids))
    narrow = make_sample(99, [1], [2], [[-0.1, -3.0]], [[5, 6]])
    packed = pack([wide, narrow])
    assert packed.ids_TK.shape[1] == TOP_K
    assert packed.ids_TK[-1].tolist() == [5, 6] + [-1] * (TOP_K - 2)
    assert np.isneginf(packed.logps_TK[-1, 2:]).all()


@pytest.mark.parametrize("n_ids", [2, 200, 20_000, 150_000, 1 << 18])
def test_whole_distributions_that_travelled_in_two_bytes_are_accepted(n_ids: int) -> None:
    """Even ones are the worst: all of their log-probabilities are rounded the same way, perhaps up."""
    logps_TK = np.full((1, n_ids), -np.log(n_ids)).astype(np.float16).astype(np.float32)
    pack([make_sample(7, [1], [2], logps_TK, np.arange(n_ids)[None])])
    for sample in SAMPLES:
        in_two_bytes = replace(sample.teacher, logps_TK=sample.teacher.logps_TK.astype(np.float16).astype(np.float32))
        pack([replace(sample, teacher=in_two_bytes)])


def test_samples_that_were_skipped_belong_to_no_part_that_needs_the_teacher() -> None:
    answered = [sample for sample in SAMPLES if len(sample.response.ids)][:3]
    sampled = replace(answered[1], teacher=TeacherTopK.absent(len(answered[1].response.ids)), is_skipped=True)
    given = replace(
        answered[2],
        prompt=replace(answered[2].prompt, reference_ids=answered[2].response.ids),
        teacher=TeacherTopK.absent(len(answered[2].response.ids)),
        is_skipped=True,
    )
    packed = pack([answered[0], sampled, given])
    lengths = np.array([len(sample.response.ids) for sample in answered])
    expected = {"distill": [True, False, False], "pg": [True, True, False], "sft": [False, False, False]}
    for name, own_T in members(packed).items():
        assert own_T.tolist() == np.repeat(expected[name], lengths).tolist(), name
    denominators = GlobalDenominators.of(GlobalDenominators.counts([packed]))
    assert denominators.n_tokens == lengths.sum() and denominators.n_tokens_of["distill"] == lengths[0]
    assert denominators.weights(packed, "token-mean")["distill"].sum() == pytest.approx(lengths.sum())


@pytest.mark.parametrize("logps", [[[0.0, 0.0]], [[np.nan, -1.0]], [[0.1, -np.inf]]])
def test_teacher_rows_that_are_no_distribution_are_refused_by_name(logps: list[list[float]]) -> None:
    with pytest.raises(DataError, match=r"sample 7: .*position 0"):
        pack([make_sample(7, [1], [2], logps, [[3, 4]])])


def test_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="sample 7 has no prompt"):
        pack([make_sample(7, [], [2], [[-1.0]], [[3]])])


def test_blocks_of_similar_length_hold_every_row_once_with_little_padding() -> None:
    lengths = [1, 30, 29, 2, 24, 7, 30, 6]
    blocks = bucket_by_length(lengths)
    rows = np.concatenate([block[block >= 0] for block in blocks])
    assert sorted(rows.tolist()) == list(range(sum(lengths)))
    for block in blocks:
        filled = (block >= 0).sum(1)
        assert (filled >= 0.75 * block.shape[1]).all()
        for line, count in zip(block, filled, strict=True):
            assert (np.diff(line[:count]) == 1).all() and (line[count:] == -1).all()
