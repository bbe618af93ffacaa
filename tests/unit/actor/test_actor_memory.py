"""The computed memory of an actor: the formula by hand for two layers, and the table of the documentation."""

from __future__ import annotations

import dataclasses

import pytest
from actor_memory import ActorLayout, dense, rank_bytes, state_bytes, table

from tests._support.repository import REPO

# hidden 256, query heads 256 wide, key heads 128 wide, 512 feed-forward columns, 1000 ids
TINY = dataclasses.replace(dense(256, 2, 512, 2, 1), vocab_size=1000)
PER_LAYER = 256 * 256 + 2 * 256 * 128 + 256 * 256 + 3 * 256 * 512 + 2 * 256  # query, key and value, output, MLP, norms
EMBEDDING = 1000 * 256
ACTIVATIONS = 2 * (4 * 256 + 2 * 256 + 2 * 128 + 3 * 512)  # per token and layer


class TestRankBytes:
    def test_one_rank_is_sum_of_states_activations_and_logits(self) -> None:
        states = (2 * PER_LAYER + 2 * EMBEDDING) * (2 + 4 + 12)
        expected = states + 100 * (2 * ACTIVATIONS + 4 * 1000)
        assert rank_bytes(TINY, ActorLayout(), 100, recompute=False) == expected

    def test_full_recompute_keeps_layer_inputs_and_one_layer(self) -> None:
        states = (2 * PER_LAYER + 2 * EMBEDDING) * 18
        expected = states + 100 * (2 * 2 * 256 + ACTIVATIONS + 4 * 1000)
        assert rank_bytes(TINY, ActorLayout(), 100, recompute=True) == expected

    def test_data_parallelism_divides_the_optimizer_only(self) -> None:
        assert state_bytes(100, ActorLayout(dp=4)) == 100 * (2 + 4 + 3)
        assert state_bytes(100, ActorLayout(dp=2, cp=2)) == state_bytes(100, ActorLayout(dp=4))

    def test_tensor_parallelism_divides_everything_with_sequence_parallelism(self) -> None:
        whole = rank_bytes(TINY, ActorLayout(), 100, recompute=False)
        assert rank_bytes(TINY, ActorLayout(tp=2), 100, recompute=False) == whole / 2
        without = rank_bytes(TINY, ActorLayout(tp=2, sequence_parallel=False), 100, recompute=False)
        assert without - whole / 2 == 100 * 2 * 8 * 256 / 2  # inputs and outputs of norms

    def test_first_pipeline_stage_holds_activations_of_all_stages(self) -> None:
        first = (PER_LAYER + EMBEDDING) * 18 + 5000 * 2 * ACTIVATIONS
        last = (PER_LAYER + EMBEDDING) * 18 + 5000 * (ACTIVATIONS + 4 * 1000)
        assert rank_bytes(TINY, ActorLayout(pp=2), 5000, recompute=False) == max(first, last) == first

    def test_model_with_experts_is_refused(self) -> None:
        moe = dataclasses.replace(TINY, moe=object())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has experts"):
            rank_bytes(moe, ActorLayout(), 100, recompute=False)


def test_documentation_has_the_computed_table() -> None:
    assert table() in (REPO / "docs" / "actor.md").read_text(encoding="utf-8")
