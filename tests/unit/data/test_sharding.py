"""Division of a batch among data-parallel ranks: complete, balanced by cost, and on the node of the teacher's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from recipe_gkd.data.samples import Prompt, Response, Sample, StoredTopK, TeacherTopK
from recipe_gkd.data.sharding import TOLERANCE, Sharding, shard_batch
from recipe_gkd.metrics.flops import forward_flops, sample_cost
from recipe_gkd.teachers.scoring.homes import NO_HOME, Homes
from tests._support.tiny_models import make_samples
from tests._support.worker_reports import rank_report
from tests.unit.metrics.test_flops import DENSE

SAMPLES = make_samples(40)
HOMES = (0, 0, 1, 1)


def uids(samples: Sequence[Sample]) -> list[int]:
    return [sample.prompt.uid for sample in samples]


def tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.n_tokens - 1 for sample in samples if len(sample.response.ids))


def sample_of(uid: int, n_tokens: int, home: int) -> Sample:
    """Return a sample with ``n_tokens`` input tokens and stored teacher rows."""
    zeros_T = np.zeros(n_tokens, np.float32)
    ids_T = zeros_T.astype(np.int32)
    return Sample(
        prompt=Prompt(uid=uid, ids=np.zeros(1, np.int32), row=0),
        response=Response(
            uid=uid, ids=ids_T, logprobs=zeros_T, finish_reason="stop", weights_version=0, versions_T=ids_T
        ),
        teacher=StoredTopK(block=None, index=0, n_bytes=0, home=home, n_scored=n_tokens, sampled_logps_T=zeros_T),
    )


def long_tailed(n: int, homes: Homes) -> list[Sample]:
    """Return samples with lognormal lengths, as those of responses."""
    lengths = np.random.default_rng(0).lognormal(5, 0.8, n).astype(int) + 1
    return [sample_of(uid, int(length), homes.of_uid(uid)) for uid, length in enumerate(lengths)]


class TestShardBatch:
    @pytest.mark.parametrize("dp_size", [1, 2, 3, 50])
    def test_shard_batch_puts_each_sample_in_one_shard_in_order(self, dp_size: int) -> None:
        shards = shard_batch(SAMPLES, dp_size)
        assert len(shards) == dp_size
        assert sorted(uid for shard in shards for uid in uids(shard)) == uids(SAMPLES)
        assert all(uids(shard) == sorted(uids(shard)) for shard in shards)

    def test_shard_batch_balances_tokens(self) -> None:
        counts = [tokens(shard) for shard in shard_batch(SAMPLES, 4)]
        assert max(counts) - min(counts) <= max(sample.n_tokens for sample in SAMPLES)
        assert max(counts) <= 1.05 * sum(counts) / 4


class TestSharding:
    def test_divide_balances_the_cost_of_attention(self) -> None:
        dims = replace(DENSE, layers=4, hidden=64, head_dim=64)
        cost = sample_cost(dims)
        lengths = [4000, *[500] * 8, *[100] * 40]
        samples = [sample_of(uid, length, NO_HOME) for uid, length in enumerate(lengths)]
        shards = Sharding([0, 0], cost).divide(samples)
        costs = [sum(cost(len(sample.response.ids), len(sample.response.ids)) for sample in shard) for shard in shards]
        by_tokens = max(map(tokens, shards)) / min(map(tokens, shards))
        assert max(costs) <= max(1.02 * sum(costs) / 2, cost(4000, 4000))
        assert by_tokens > 1.5  # the rank with the long sample has fewer tokens

    def test_divide_keeps_rows_on_their_node(self) -> None:
        samples = long_tailed(2000, Homes(("a", "b"), HOMES))
        shards = Sharding(HOMES).divide(samples)
        counts = np.array([tokens(shard) for shard in shards])
        moved = [s for rank, shard in enumerate(shards) for s in shard if s.teacher.home != HOMES[rank]]  # type: ignore[union-attr]
        assert sorted(uid for shard in shards for uid in uids(shard)) == uids(samples)
        assert counts.max() <= (1 + TOLERANCE) * counts.mean() + 1
        assert tokens(moved) < 0.05 * counts.sum()

    def test_divide_rows_of_one_node_are_moved_rather_than_unbalanced(self) -> None:
        samples = [replace(s, teacher=replace(s.teacher, home=0)) for s in long_tailed(400, Homes(("a",), (0,)))]  # type: ignore[type-var]
        counts = np.array([tokens(shard) for shard in Sharding(HOMES).divide(samples)])
        assert counts.max() <= (1 + TOLERANCE) * counts.mean() + 1

    def test_divide_does_not_depend_on_where_rows_arrived_without_a_home(self) -> None:
        samples = long_tailed(50, Homes(("a", "b"), HOMES))
        local = [replace(s, teacher=TeacherTopK.absent(len(s.response.ids))) for s in samples]
        unplaced = [replace(s, teacher=replace(s.teacher, home=NO_HOME)) for s in samples]  # type: ignore[type-var]
        assert [uids(s) for s in Sharding(HOMES).divide(local)] == [uids(s) for s in Sharding(HOMES).divide(unplaced)]


class TestHomes:
    def test_homes_are_the_nodes_of_the_last_stage(self) -> None:
        ranks = [rank_report(dp, pp) for pp in (0, 1) for dp in (0, 1) for _tp in (0, 1)]
        nodes = ["first"] * 4 + ["second", "second", "third", "third"]
        homes = Homes.of(ranks, nodes)
        assert homes == Homes(("second", "third"), (0, 1))
        assert [homes.of_uid(uid) for uid in range(5)] == [0, 1, 0, 1, 0]


def test_sample_cost_is_the_flops_of_the_forward_pass() -> None:
    dims = replace(DENSE, layers=3, hidden=16)
    cost = sample_cost(dims)
    assert cost(7, 3) + cost(11, 4) == forward_flops(dims, [7, 11], 7)
