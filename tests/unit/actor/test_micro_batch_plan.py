"""Plan of an update from lengths alone: what each rank checks, packs and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.batch import micro_batch_plan
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan, plan_micro_batches
from recipe_gkd.actor.objective.loss_terms import GlobalDenominators
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import DataError, SecondaryFailure
from tests._support.errors import raises
from tests._support.tiny_models import make_config, make_samples, without_empty

SAMPLES = make_samples(12)
ONE = Layout.data_parallel(0, 1)
INVALID = make_sample(99, [1], [2], [[0.0, 0.0]], [[3, 4]])


def plan(
    samples: list[Sample], layout: Layout = ONE, *overrides: str, micro_batch_multiple: int = 1, row_multiple: int = 1
) -> MicroBatchPlan:
    backend: Any = SimpleNamespace(
        layout=layout,
        device=torch.device("cpu"),
        attention=AttentionKernel.TE_FUSED,
        row_multiple=row_multiple,
        micro_batch_multiple=micro_batch_multiple,
    )
    config = make_config(Path("unused"), *overrides, ranks=layout.world_size).actor_rollout_ref.actor
    return plan_micro_batches(backend, config, samples, 3, loss_agg_mode="token-mean")


@pytest.fixture
def all_reduce(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[torch.Tensor], None]]:
    """Return a list of functions that add the values of other ranks in the all-reduce."""
    others: list[Callable[[torch.Tensor], None]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, **_: [add(values) for add in others])
    return others


class TestPlanMicroBatches:
    def test_plan_packs_nothing(self, all_reduce: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(micro_batch_plan, "pack", lambda *_, **__: pytest.fail("packed"))
        found = plan(SAMPLES)
        assert sum(map(len, found.groups)) == len(without_empty(SAMPLES)) and found.count == len(found.groups) > 1
        assert found.denominators == GlobalDenominators.of(GlobalDenominators.counts(SAMPLES))

    def test_plan_has_largest_count_of_all_ranks_and_sum_of_tokens(self, all_reduce: list[Any]) -> None:
        layout = replace(ONE, world_size=3, dp_size=3, rank=1, dp_rank=1)
        all_reduce.append(lambda values: values.add_(torch.tensor([0, 2, 0, 9] + [5] * 7)))
        found = plan(SAMPLES[:2], layout)
        assert found.count == 9 and len(found.groups) == 1
        assert found.denominators.n_tokens == 5 + sum(len(sample.response.ids) for sample in SAMPLES[:2])
        assert found.stage(8).uids_T.size == 0

    def test_plan_of_rank_with_same_samples_adds_no_tokens(self, all_reduce: list[Any]) -> None:
        layout = replace(ONE, world_size=2, tp_size=2, rank=1, tp_rank=1)
        assert plan(SAMPLES, layout).denominators.n_tokens == 0

    def test_plan_with_invalid_sample_raises_after_the_all_reduce(self, all_reduce: list[Any]) -> None:
        seen = []
        all_reduce.append(lambda values: seen.append(values[0].item()))
        with raises(DataError, uid=99):
            plan([*SAMPLES, INVALID])
        assert seen == [1.0]

    def test_plan_with_invalid_sample_of_other_rank_raises_secondary_failure(self, all_reduce: list[Any]) -> None:
        all_reduce.append(lambda values: values[0].add_(1))
        with raises(SecondaryFailure, phase="update 3"):
            plan(SAMPLES)

    def test_plan_lets_ranks_with_same_samples_check_each_sample_once(
        self, all_reduce: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked: list[int] = []
        monkeypatch.setattr(
            micro_batch_plan, "check_samples", lambda samples: checked.extend(each.prompt.uid for each in samples)
        )
        for rank in range(8):
            tp_rank, cp_rank, pp_rank = rank % 2, rank // 2 % 2, rank // 4
            plan(
                SAMPLES,
                replace(
                    ONE,
                    world_size=8,
                    rank=rank,
                    tp_size=2,
                    cp_size=2,
                    pp_size=2,
                    tp_rank=tp_rank,
                    cp_rank=cp_rank,
                    pp_rank=pp_rank,
                ),
            )
        assert sorted(checked) == [sample.prompt.uid for sample in SAMPLES]


class TestStage:
    def test_stage_packs_the_top_k_on_the_last_pipeline_stage_only(self, all_reduce: list[Any]) -> None:
        first, last = (
            plan(SAMPLES, replace(ONE, world_size=2, pp_size=2, pp_rank=stage, rank=stage)).stage(0) for stage in (0, 1)
        )
        assert first.tensors["ids_TK"].shape[1] == first.tensors["logps_TK"].shape[1] == 0
        assert last.tensors["ids_TK"].shape[1] > 0
        np.testing.assert_array_equal(first.tensors["token_ids_N"], last.tensors["token_ids_N"])

    def test_stage_prepares_no_rows_that_the_kernel_does_not_read(self, all_reduce: list[Any]) -> None:
        assert {"block/0", "unpack_index_N"}.isdisjoint(plan(SAMPLES).stage(0).tensors)

    def test_plan_rounds_the_count_up_to_a_multiple(self, all_reduce: list[Any]) -> None:
        count = plan(SAMPLES).count
        assert plan(SAMPLES, micro_batch_multiple=count + 3).count == count + 3

    def test_stage_pads_the_row_to_a_multiple(self, all_reduce: list[Any]) -> None:
        found = plan(SAMPLES, row_multiple=2)
        assert {len(found.stage(index).tensors["token_ids_N"]) % 2 for index in range(found.count + 1)} == {0}

    @pytest.mark.parametrize("row_multiple", [1, 2, 3])
    @pytest.mark.parametrize("cp_size", [1, 2, 4])
    def test_row_length_equals_that_of_packed_row(self, cp_size: int, row_multiple: int, all_reduce: list[Any]) -> None:
        layouts = [replace(ONE, world_size=cp_size, rank=r, cp_size=cp_size, cp_rank=r) for r in range(cp_size)]
        for found in (plan(SAMPLES, layout, row_multiple=row_multiple) for layout in layouts):
            indices = range(found.count + 1)  # the last one is empty
            packed = [len(found.stage(index).tensors["token_ids_N"]) for index in indices]
            assert len({*packed}) > 2
            assert [found.row_length(index) for index in indices] == packed
