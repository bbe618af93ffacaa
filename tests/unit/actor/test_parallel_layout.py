"""Coordinates of a rank, and numbers of ranks that hold no complete copy of the model."""

from __future__ import annotations

import dataclasses

from recipe_gkd.actor.megatron.parallel import check_world_size
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.layouts import CP2, PP2, TP2
from tests._support.tiny_models import MEGATRON

ONE_RANK = Layout(
    rank=0, world_size=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, cp_rank=0, cp_size=1, dp_rank=0, dp_size=1,
    ep_rank=0, ep_size=1, etp_rank=0, etp_size=1,
)  # fmt: skip


def megatron_config(*overrides: str) -> MegatronConfig:
    return base_config("trainer.n_gpus_per_node=8", *overrides).actor_rollout_ref.actor.megatron


class TestLayout:
    def test_context_rank_counts_own_tokens_and_no_samples(self) -> None:
        ranks = [dataclasses.replace(ONE_RANK, cp_rank=rank, cp_size=2) for rank in range(2)]
        assert [rank.counts_tokens for rank in ranks] == [True, True]
        assert [rank.counts_samples for rank in ranks] == [True, False]

    def test_str_names_context_ranks_only_if_there_are_any(self) -> None:
        assert str(ONE_RANK) == "tensor 1 x pipeline 1 x data 1, expert 1 x expert tensor 1"
        assert str(dataclasses.replace(ONE_RANK, cp_size=2)).startswith("tensor 1 x context 2 x pipeline 1 x data 1")


class TestCheckWorldSize:
    def test_check_world_size_with_context_ranks_needs_a_multiple_of_all_sizes(self) -> None:
        config = megatron_config(TP2, CP2, PP2)
        check_world_size(config, 8)
        sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        with raises(ConfigError, keys=tuple(f"{MEGATRON}.{size}" for size in sizes)):
            check_world_size(config, 4)
