"""Losses on tensor-parallel ranks: each rank has the results of a single process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.diagnostics import topk_overlap
from recipe_gkd.losses.distributions import valid_entries
from tests._support import custom_loss_runs as custom_loss
from tests._support import fused_head_runs as fused_head
from tests._support import log_stats_runs as log_stats
from tests._support import topk_overlap_cases as overlap
from tests._support.loss_cases import VOCABULARY
from tests._support.loss_runs import process_group
from tests._support.tiny_models import VOCAB
from tests._support.worker_pool import WorkerPool


def fused_head_on_rank(rank: int, world_size: int, port: int) -> list[list[np.ndarray]]:
    with process_group(rank, world_size, port) as tp_group:
        return [[part.double().numpy() for part in fused_head.fused(*run, tp_group)] for run in fused_head.RUNS]


def log_stats_on_rank(rank: int, world_size: int, port: int) -> list[list[np.ndarray]]:
    with process_group(rank, world_size, port) as tp_group:
        return [
            [part.double().numpy() for part in log_stats.as_results(*results)]
            for run in log_stats.RUNS
            for dtype in log_stats.DTYPES
            for results in [log_stats.stats_and_gradient(*run, dtype, 6, tp_group)]
        ]


def overlaps_on_rank(rank: int, world_size: int, port: int) -> list[list[float]]:
    with process_group(rank, world_size, port) as tp_group:
        found = []
        for case in map(overlap.overlap_case, overlap.SIZES):
            valid = valid_entries(case.logps_TK, case.ids_TK, VOCABULARY)
            shard = case.logits_TW.chunk(world_size, dim=1)[rank]
            found.append(topk_overlap(shard, case.ids_TK, valid, vocab_size=VOCABULARY, tp_group=tp_group).tolist())
        return found


def custom_losses_on_rank(rank: int, world_size: int, port: int, gkds: list[GkdConfig]) -> list[custom_loss.Result]:
    with process_group(rank, world_size, port) as tp_group:
        return [custom_loss.loss_and_gradients(gkd, tp_group=tp_group) for gkd in gkds]


class TestTensorParallel:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_fused_head_equals_unfused(self, pool: WorkerPool, world_size: int) -> None:
        ranks = pool.run(world_size, fused_head_on_rank)
        for number, (dtype, temperature, _) in enumerate(fused_head.RUNS):
            grad_weight = np.concatenate([results[number][-1] for results in ranks])
            for results in ranks:
                got = tuple(torch.from_numpy(part) for part in (*results[number][:-1], grad_weight))
                fused_head.check(got, fused_head.unfused(dtype, temperature), dtype)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_log_stats_equal_dense_float64(self, pool: WorkerPool, world_size: int) -> None:
        ranks = pool.run(world_size, log_stats_on_rank)
        runs = [(run, dtype) for run in log_stats.RUNS for dtype in log_stats.DTYPES]
        for number, (run, dtype) in enumerate(runs):
            grad = np.concatenate([results[number][-1] for results in ranks], axis=1)
            for results in ranks:
                got = tuple(torch.from_numpy(part) for part in (*results[number][:-1], grad))
                log_stats.check(got, log_stats.dense_results(*run), dtype)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_topk_overlap_equals_sets(self, pool: WorkerPool, world_size: int) -> None:
        for found in pool.run(world_size, overlaps_on_rank):
            for k, got in zip(overlap.SIZES, found, strict=True):
                assert got == pytest.approx(overlap.overlap_of_sets(overlap.overlap_case(k)), nan_ok=True), k

    @pytest.mark.parametrize("custom", ["forward_kl", "all_statistics"])
    def test_custom_loss_equals_single_process(self, custom: str, pool: WorkerPool) -> None:
        built_in = None if custom == "forward_kl" else custom
        gkds = [custom_loss.gkd_config(*layout, custom=custom) for layout in custom_loss.LAYOUTS]
        ranks = pool.run(2, custom_losses_on_rank, gkds)
        for number, layout in enumerate(custom_loss.LAYOUTS):
            gkd = custom_loss.gkd_config(*layout, custom=built_in)
            expected_T, _, (expected_TD, expected_VD) = custom_loss.loss_and_gradients(gkd)
            for results in ranks:
                loss_T, _, (grad_TD, _) = results[number]
                torch.testing.assert_close(loss_T, expected_T, rtol=1e-11, atol=1e-11)
                torch.testing.assert_close(grad_TD, expected_TD, rtol=1e-10, atol=1e-10)
            grad_VD = torch.cat([results[number][2][1] for results in ranks])
            torch.testing.assert_close(grad_VD, expected_VD, rtol=1e-10, atol=1e-10)
            assert (grad_VD[VOCAB:] == 0).all()
