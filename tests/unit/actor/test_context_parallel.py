"""Division of a packed row among context-parallel ranks: each token has one owner, with its weight and its labels."""

from __future__ import annotations

import numpy as np
import pytest

from recipe_gkd.actor.batch.context_parallel import ContextShard, gathered_rows, shard_for_context, zigzag_rows
from recipe_gkd.actor.batch.packing import PackedBatch, pack
from recipe_gkd.actor.objective.loss_terms import GlobalDenominators
from tests._support.tiny_models import make_samples, without_empty

SAMPLES = without_empty(make_samples(6))


def shards_of(
    packed: PackedBatch, cp_size: int, multiple_of: int = 1
) -> tuple[list[ContextShard], list[dict[str, np.ndarray]]]:
    denominators = GlobalDenominators.of(GlobalDenominators.counts(SAMPLES))
    weights = denominators.weights(packed, "seq-mean-token-mean")
    parts, part_weights = [], []
    for cp_rank in range(cp_size):
        part, own = shard_for_context(packed, weights, cp_rank=cp_rank, cp_size=cp_size, multiple_of=multiple_of)
        assert isinstance(part, ContextShard)
        parts.append(part)
        part_weights.append(own)
    return parts, part_weights


class TestZigzagRows:
    def test_zigzag_rows_of_two_sequences_are_those_of_megatron(self) -> None:
        assert zigzag_rows([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
        assert zigzag_rows([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]

    @pytest.mark.parametrize("cp_size", [2, 3, 4])
    def test_zigzag_rows_of_all_ranks_are_a_permutation(self, cp_size: int) -> None:
        lengths = [2 * cp_size * factor for factor in (3, 1, 2)]
        rows = np.concatenate([zigzag_rows(lengths, cp_rank, cp_size) for cp_rank in range(cp_size)])
        assert sorted(rows.tolist()) == list(range(sum(lengths)))


class TestShardForContext:
    def test_shard_for_context_of_one_rank_changes_nothing(self) -> None:
        packed, weights = pack(SAMPLES), {"pg": np.ones(3)}
        assert shard_for_context(packed, weights, cp_rank=0, cp_size=1) == (packed, weights)

    @pytest.mark.parametrize(("cp_size", "multiple_of"), [(2, 1), (2, 2), (3, 2), (4, 4)])
    def test_shard_for_context_pads_each_sequence_and_the_rows_of_a_rank(self, cp_size: int, multiple_of: int) -> None:
        packed = pack(SAMPLES)
        parts, _ = shards_of(packed, cp_size, multiple_of)
        for part in parts:
            assert part.lengths == parts[0].lengths and all(length % (2 * cp_size) == 0 for length in part.lengths)
            assert len(part.token_ids_N) == len(part.position_ids_N) == sum(part.lengths) // cp_size
            assert len(part.token_ids_N) % multiple_of == 0
        for length, padded in zip(packed.lengths, parts[0].lengths, strict=False):
            assert length <= padded < length + 2 * cp_size

    @pytest.mark.parametrize("cp_size", [2, 3, 4])
    def test_shard_for_context_gives_each_response_token_to_the_rank_of_its_row(self, cp_size: int) -> None:
        packed = pack(SAMPLES)
        positions_N = packed.position_ids_N
        parts, weights = shards_of(packed, cp_size)
        want = {
            (uid, position): (packed.token_ids_N[row], positions_N[row], ids_K.tolist())
            for uid, position, row, ids_K in zip(
                packed.uids_T, packed.positions_T, packed.loss_rows_T, packed.ids_TK, strict=True
            )
        }
        found = {}
        for part, own in zip(parts, weights, strict=True):
            assert {len(weight_T) for weight_T in own.values()} == {len(part.uids_T)}
            for uid, position, row, ids_K in zip(
                part.uids_T, part.positions_T, part.loss_rows_T, part.ids_TK, strict=True
            ):
                found[uid, position] = (part.token_ids_N[row], part.position_ids_N[row], ids_K.tolist())
        assert sum(len(part.uids_T) for part in parts) == len(packed.uids_T) and found == want
        assert sum(own["distill"].sum() for own in weights) == pytest.approx(len(packed.uids_T))

    def test_shard_for_context_of_empty_batch_has_padding_rows_only(self) -> None:
        (part, _), _ = shards_of(pack([], multiple_of=2), 2, 2)
        assert part.lengths == [4] and part.token_ids_N.tolist() == [0, 0] and len(part.uids_T) == 0

    def test_gathered_rows_invert_the_division(self) -> None:
        parts, _ = shards_of(pack(SAMPLES), 2)
        order_N = gathered_rows(parts[0])
        assert order_N is not None and order_N.tolist() == [*parts[0].own_rows_M, *parts[1].own_rows_M]
        assert gathered_rows(pack(SAMPLES)) is None
