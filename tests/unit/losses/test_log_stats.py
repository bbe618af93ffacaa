"""Student statistics: buckets at one temperature, sampled token and entropy at temperature 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recipe_gkd.commands.gpu_smoke.reference import dense_sampled_and_entropy
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery
from tests._support.log_stats_runs import (
    DTYPES,
    RUNS,
    as_results,
    cached_case,
    check,
    dense_results,
    make_query,
    scalar,
    stats_and_gradient,
)
from tests._support.loss_cases import COLUMNS, ROWS, VOCABULARY


class TestComputeLogStats:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("k, temperature, differentiates_entropy", RUNS)
    def test_single_process_equals_dense_float64(
        self, k: int, temperature: float, differentiates_entropy: bool, dtype: torch.dtype
    ) -> None:
        for chunk_tokens in (None, 1, 4):
            got = as_results(*stats_and_gradient(k, temperature, differentiates_entropy, dtype, chunk_tokens))
            check(got, dense_results(k, temperature, differentiates_entropy), dtype)

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
    def test_large_logits_keep_their_digits(self, temperature: float) -> None:
        """An offset of all logits changes nothing in float64. Powers of two as temperatures would hide an error."""
        generator = torch.Generator().manual_seed(0)
        logits_TW = (3 * torch.randn(32, COLUMNS, generator=generator, dtype=torch.float64) + 3e4).float()
        ids_TK = torch.randn(32, VOCABULARY, generator=generator).argsort(1)[:, :8]
        query = LogitsQuery(
            ids_TK=ids_TK,
            valid_TK=torch.ones_like(ids_TK, dtype=torch.bool),
            sampled_T=ids_TK[:, 0],
            vocab_size=VOCABULARY,
            temperature=temperature,
            entropy_has_gradient=True,
        )
        results = []
        for dtype in (torch.float32, torch.float64):
            leaf = logits_TW.to(dtype, copy=True).requires_grad_()
            stats = compute_log_stats(leaf, query)
            scalar(stats.log_mass_TB.log_softmax(1), stats.sampled_logp_T, stats.entropy_T).backward()
            assert leaf.grad is not None
            results.append(as_results(stats, leaf.grad))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)

    def test_chunks_of_positions_give_equal_results(self) -> None:
        for run in ((5, 1.0, False), (5, 2.0, False), (5, 1.0, True)):
            whole, grad = stats_and_gradient(*run, torch.float32, None)
            for chunk_tokens in (1, 2, 3, len(ROWS) - 1, len(ROWS), 1000):
                chunked, chunked_grad = stats_and_gradient(*run, torch.float32, chunk_tokens)
                assert torch.equal(grad, chunked_grad)
                for name in ("log_mass_TB", "sampled_logp_T", "entropy_T"):
                    assert torch.equal(getattr(whole, name), getattr(chunked, name)), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_sampled_id_of_the_padding_has_no_probability_and_no_gradient(self, dtype: torch.dtype) -> None:
        case = cached_case(5, 1.0)
        query = make_query(case, 1.0)
        gradients = []
        for sampled_T in (query.sampled_T, torch.full_like(query.sampled_T, COLUMNS - 1)):
            leaf = case.logits_TW.to(dtype, copy=True).requires_grad_()
            stats = compute_log_stats(leaf, replace(query, sampled_T=sampled_T))
            stats.log_mass_TB.log_softmax(1)[:, 0].sum().backward()
            gradients.append(leaf.grad)
        assert COLUMNS > VOCABULARY and torch.isneginf(stats.sampled_logp_T).all()
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)

    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_entropy_gradient_alone_equals_dense_float64(self, temperature: float) -> None:
        case = cached_case(5, temperature)
        query = replace(make_query(case, temperature), entropy_has_gradient=True)
        ours, dense = case.logits_TW.double().requires_grad_(), case.logits_TW.double().requires_grad_()
        compute_log_stats(ours, query).entropy_T.sum().backward()
        dense_sampled_and_entropy(dense, query.sampled_T, VOCABULARY)[1].sum().backward()
        torch.testing.assert_close(ours.grad, dense.grad, rtol=1e-10, atol=1e-12)
