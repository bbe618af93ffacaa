"""Division and packing of a batch: each sample is used once, and each row has the right content."""

from __future__ import annotations

from dataclasses import Field, fields, replace

import numpy as np
import pytest
import torch

from recipe_gkd.actor.batch.context_parallel import shard_for_context
from recipe_gkd.actor.batch.device_batch import to_device
from recipe_gkd.actor.batch.packing import PackedBatch, bucket_by_length, micro_batches, pack
from recipe_gkd.actor.batch.staging import stage
from recipe_gkd.actor.batch.token_fields import TokenFields
from recipe_gkd.actor.objective.loss_terms import GlobalDenominators, loss_term_masks
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.data.samples import Sample, TeacherTopK
from tests._support.routed_experts import with_routing
from tests._support.tiny_models import TOP_K, make_samples, without_empty

SAMPLES = make_samples(40)


def uids(samples: list[Sample]) -> list[int]:
    return [sample.prompt.uid for sample in samples]


def tokens(samples: list[Sample]) -> int:
    return sum(sample.n_tokens - 1 for sample in samples if len(sample.response.ids))


class TestMicroBatches:
    def test_micro_batches_by_tokens_respect_limit_and_keep_all_samples(self) -> None:
        groups = micro_batches(SAMPLES, micro_batch_size=1, max_token_len=50)
        with_response = without_empty(SAMPLES)
        assert sorted(uid for group in groups for uid in uids(group)) == uids(with_response)
        assert all(tokens(group) <= 50 for group in groups)
        assert len(groups) <= 1.25 * tokens(SAMPLES) / 50 + 1

    def test_micro_batches_with_overlong_sample_isolate_it(self) -> None:
        groups = micro_batches(SAMPLES, micro_batch_size=1, max_token_len=10)
        long = [group for group in groups if tokens(group) > 10]
        assert long and all(len(group) == 1 for group in long)

    @pytest.mark.parametrize("size", [1, 2, 7])
    def test_micro_batches_by_samples_have_given_size(self, size: int) -> None:
        groups = micro_batches(SAMPLES, micro_batch_size=size, max_token_len=None)
        with_response = without_empty(SAMPLES)
        assert uids([s for group in groups for s in group]) == uids(with_response)
        assert [len(group) for group in groups[:-1]] == [size] * (len(groups) - 1)


class TestPack:
    def test_pack_aligns_teacher_rows_with_predicting_rows(self) -> None:
        samples = without_empty(SAMPLES)
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

    def test_pack_marks_tokens_that_the_present_weights_sampled(self) -> None:
        first, second = without_empty(SAMPLES)[:2]
        updated_in_flight = replace(first.response, versions_T=np.arange(len(first.response.ids), dtype=np.int32))
        batch = [replace(first, response=updated_in_flight), second]
        n_first, n_second = len(first.response.ids), len(second.response.ids)
        packed = pack(batch, version=1)
        assert packed.is_current_T.tolist() == [t == 1 for t in range(n_first)] + [False] * n_second
        assert not pack(batch).is_current_T.any()
        reference = replace(second, prompt=replace(second.prompt, reference_ids=second.response.ids))
        version = second.response.weights_version
        assert pack([second], version=version).is_current_T.all()
        assert not pack([reference], version=version).is_current_T.any()

    def test_pack_without_samples_has_padding_and_no_loss_rows(self) -> None:
        packed = pack([], multiple_of=2)
        assert packed.lengths == [2] and len(packed.loss_rows_T) == 0

    def test_pack_with_smaller_top_k_fills_unused_entries(self) -> None:
        wide = without_empty(SAMPLES)[0]
        narrow = make_sample(99, [1], [2], [[-0.1, -3.0]], [[5, 6]])
        packed = pack([wide, narrow])
        assert packed.ids_TK.shape[1] == TOP_K
        assert packed.ids_TK[-1].tolist() == [5, 6] + [-1] * (TOP_K - 2)
        assert np.isneginf(packed.logps_TK[-1, 2:]).all()

    def test_pack_has_int32_indices_and_index_of_response(self) -> None:
        packed = pack(without_empty(SAMPLES)[:3])
        indices = ("token_ids_N", "loss_rows_T", "ids_TK", "response_ids_T", "positions_T", "sequence_T")
        assert {getattr(packed, name).dtype for name in indices} == {np.dtype(np.int32)}
        first_uid = without_empty(SAMPLES)[0].prompt.uid
        assert (packed.sequence_T == 0).tolist() == (packed.uids_T == first_uid).tolist()
        assert packed.position_ids_N.dtype == np.int32

    def test_pack_without_teacher_differs_only_in_the_top_k(self) -> None:
        samples = without_empty(SAMPLES)

        def allocate(shape: tuple[int, ...], dtype: object) -> np.ndarray:
            pytest.fail("the teacher's arrays were allocated")

        whole, bare = pack(samples), pack(samples, with_teacher=False, allocate=allocate)
        assert bare.logps_TK.shape == bare.ids_TK.shape == (len(whole.uids_T), 0)
        for field in fields(PackedBatch):
            if field.name not in ("logps_TK", "ids_TK"):
                np.testing.assert_array_equal(getattr(whole, field.name), getattr(bare, field.name), field.name)

    def test_pack_of_float16_scores_keeps_them(self) -> None:
        samples = without_empty(SAMPLES)[:2]
        narrow = [
            replace(each, teacher=replace(each.teacher, logps_TK=each.teacher.logps_TK.astype(np.float16)))
            for each in samples
        ]
        unscored = replace(SAMPLES[-1], teacher=TeacherTopK.absent(len(SAMPLES[-1].response.ids)))
        assert pack([*narrow, unscored]).logps_TK.dtype == np.float16
        assert pack([narrow[0], samples[1]]).logps_TK.dtype == np.float32


class TestTokenFields:
    @pytest.mark.parametrize("one", fields(TokenFields), ids=lambda one: one.name)
    @pytest.mark.parametrize("cp_size", [1, 2])
    def test_field_reaches_the_device_with_the_values_of_its_sample(self, one: Field[object], cp_size: int) -> None:
        """A field is declared once: packing, division among context ranks and the copy follow from the table."""
        samples, device = without_empty(SAMPLES), torch.device("cpu")
        packed, found = pack(samples, version=1), []
        for cp_rank in range(cp_size):
            shard, weights = shard_for_context(packed, {}, cp_rank=cp_rank, cp_size=cp_size)
            batch = to_device(stage(shard, weights, device), device)
            order = batch.sequence_T * 1000 + batch.positions_T
            found += zip(order.tolist(), getattr(batch, one.name).tolist(), strict=True)
        if one.name == "loss_rows_T":  # rows of the rank
            return
        expected = getattr(packed, one.name)
        assert expected.dtype == np.dtype(one.metadata["dtype"])
        np.testing.assert_array_equal([value for _, value in sorted(found)], expected)
        if source := one.metadata.get("of_sample"):
            of_tokens = [source(sample) for sample in samples for _ in sample.response.ids]
            np.testing.assert_array_equal(expected, np.array(of_tokens, expected.dtype))


class TestRoutedExperts:
    @pytest.mark.parametrize("cp_size", [1, 2])
    def test_experts_reach_the_device_with_their_token(self, cp_size: int) -> None:
        """Each expert is the id of its token, so that both can be compared after the division among context ranks."""
        first, second, third = without_empty(SAMPLES)[:3]

        def ids_PX(sample: Sample, n_tokens: int) -> np.ndarray:
            return np.broadcast_to(sample.token_ids[:n_tokens, None, None].astype(np.int16), (n_tokens, 2, 3))

        samples = [
            with_routing(first, ids_PX(first, first.n_tokens - 1)),
            second,
            with_routing(third, ids_PX(third, 2)),
        ]
        packed = pack(samples, multiple_of=4)
        for cp_rank in range(cp_size):
            part, weights = shard_for_context(packed, {}, cp_rank=cp_rank, cp_size=cp_size)
            batch = to_device(stage(part, weights, torch.device("cpu")), torch.device("cpu"))
            found_NX = batch.routed_experts_NX
            assert found_NX is not None and found_NX.dtype == torch.int16
            assert found_NX.shape == (len(part.token_ids_N), 2, 3)
            is_given_N = (found_NX >= 0).all((1, 2))
            assert torch.equal(found_NX[is_given_N, 0, 0].long(), batch.token_ids_1N[0][is_given_N])
        assert packed.routed_experts_NX is not None
        given_N = (packed.routed_experts_NX >= 0).all((1, 2))
        n_first, n_second = first.n_tokens - 1, second.n_tokens - 1
        assert given_N.tolist() == [True] * n_first + [False] * n_second + [True] * 2 + [False] * (
            len(given_N) - n_first - n_second - 2
        )

    def test_batch_without_experts_has_no_array(self) -> None:
        packed = pack(SAMPLES[:3])
        assert packed.routed_experts_NX is None
        batch = to_device(stage(packed, {}, torch.device("cpu")), torch.device("cpu"))
        assert batch.routed_experts_NX is None


class TestTeacherTopK:
    def test_is_scored_is_true_for_rows_with_any_valid_id(self) -> None:
        ids_TK = np.array([[4, 5], [-1, 5], [-1, -1]], np.int32)
        scores = TeacherTopK(logps_TK=np.zeros((3, 2)), ids_TK=ids_TK, sampled_logps_T=np.zeros(3))
        assert scores.is_scored_T.tolist() == [True, True, False]
        assert TeacherTopK.absent(2).is_scored_T.tolist() == [False, False]


class TestLossTermMasks:
    def test_loss_term_masks_of_skipped_samples_exclude_distill_and_sft(self) -> None:
        samples = without_empty(SAMPLES)[:3]
        sampled = replace(samples[1], teacher=TeacherTopK.absent(len(samples[1].response.ids)), is_skipped=True)
        reference = replace(
            samples[2],
            prompt=replace(samples[2].prompt, reference_ids=samples[2].response.ids),
            teacher=TeacherTopK.absent(len(samples[2].response.ids)),
            is_skipped=True,
        )
        packed = pack([samples[0], sampled, reference])
        lengths = np.array([len(sample.response.ids) for sample in samples])
        expected = {"distill": [True, False, False], "pg": [True, True, False], "sft": [False, False, False]}
        for name, own_T in loss_term_masks(packed).items():
            assert own_T.tolist() == np.repeat(expected[name], lengths).tolist(), name
        denominators = GlobalDenominators.of(GlobalDenominators.counts([samples[0], sampled, reference]))
        assert denominators.n_tokens == lengths.sum() and denominators.n_tokens_of["distill"] == lengths[0]
        assert denominators.weights(packed, "token-mean")["distill"].sum() == pytest.approx(lengths.sum())

    def test_counts_of_samples_are_those_of_the_masks(self) -> None:
        """The counts come from the samples alone, before anything is packed."""
        partial_ids = without_empty(SAMPLES)[5].teacher.ids_TK.copy()
        partial_ids[1:] = -1
        mixed = [
            with_reference(sample) if number % 3 == 1 else sample for number, sample in enumerate(SAMPLES[:12])
        ] + [replace(without_empty(SAMPLES)[5], teacher=replace(without_empty(SAMPLES)[5].teacher, ids_TK=partial_ids))]
        mixed[2] = replace(mixed[2], teacher=TeacherTopK.absent(len(mixed[2].response.ids)), is_skipped=True)
        mixed[4] = replace(mixed[4], teacher=TeacherTopK.absent(len(mixed[4].response.ids)))
        packed = pack(without_empty(mixed))
        masks = loss_term_masks(packed)
        n_tokens, *others = GlobalDenominators.counts(mixed)
        assert n_tokens == len(packed.uids_T)
        assert others[:3] == [mask_T.sum() for mask_T in masks.values()]
        assert others[3:] == [len(np.unique(packed.sequence_T[mask_T])) for mask_T in masks.values()]

    @pytest.mark.parametrize("name", ["distill", "pg", "sft"])
    def test_weights_of_each_response_with_a_term_are_equal(self, name: str) -> None:
        """The mean over a response counts only its tokens in the term, such as those before gkd.max_loss_position."""
        batch = without_empty(SAMPLES)[:6]
        for number, sample in enumerate(batch):
            ids_TK = sample.teacher.ids_TK.copy()
            ids_TK[1 + number :] = -1
            batch[number] = replace(sample, teacher=replace(sample.teacher, ids_TK=ids_TK))
        batch[2] = with_reference(replace(batch[2], teacher=TeacherTopK.absent(len(batch[2].response.ids))))
        batch[4] = with_reference(batch[4])
        packed, denominators = pack(batch), GlobalDenominators.of(GlobalDenominators.counts(batch))
        weights_T = denominators.weights(packed, "seq-mean-token-mean")[name]
        of_responses = np.bincount(packed.sequence_T, weights_T)
        n_responses = {"distill": 5, "pg": 4, "sft": 1}[name]
        assert sorted(of_responses) == pytest.approx(
            [0.0] * (6 - n_responses) + [len(weights_T) / n_responses] * n_responses
        )


def with_reference(sample: Sample) -> Sample:
    return replace(sample, prompt=replace(sample.prompt, reference_ids=sample.response.ids))


class TestBucketByLength:
    def test_bucket_by_length_has_each_row_once_with_little_padding(self) -> None:
        lengths = [1, 30, 29, 2, 24, 7, 30, 6]
        blocks = bucket_by_length(lengths)
        rows = np.concatenate([block[block >= 0] for block in blocks])
        assert sorted(rows.tolist()) == list(range(sum(lengths)))
        for block in blocks:
            filled = (block >= 0).sum(1)
            assert (filled >= 0.75 * block.shape[1]).all()
            for line, count in zip(block, filled, strict=True):
                assert (np.diff(line[:count]) == 1).all() and (line[count:] == -1).all()
