"""Statistics from hidden states and the output layer equal those from logits, in value and in both gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import fused_head
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.log_stats import compute_log_stats
from tests._support.fused_head_runs import (
    RUNS,
    cached_case,
    check,
    finish,
    fused,
    loss_of,
    make_inputs,
    make_query,
    unfused,
)
from tests._support.loss_cases import row_weights


class TestFusedHead:
    @pytest.mark.parametrize("dtype, temperature, chunk_tokens", RUNS)
    def test_single_process_equals_unfused(
        self, dtype: torch.dtype, temperature: float, chunk_tokens: int | None
    ) -> None:
        got = fused(dtype, temperature, chunk_tokens)
        assert got[3].dtype == got[4].dtype == dtype
        check(got, unfused(dtype, temperature), dtype)

    @pytest.mark.parametrize("chunk_tokens", [None, 5])
    def test_float32_head_equals_exact_logits_of_16_bit_factors(self, chunk_tokens: int | None) -> None:
        """The statistics are those of float64 logits; the gradients are rounded to bfloat16 only once."""
        case, (hidden, weight) = cached_case(2.0), make_inputs(torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        query = make_query(case, 2.0)
        expected = finish(compute_log_stats(exact[0] @ exact[1].T, query), case, query, *exact)
        got = fused(torch.bfloat16, 2.0, chunk_tokens, float32_head=True)
        rounded = fused(torch.bfloat16, 2.0, chunk_tokens)
        for number in range(3):
            torch.testing.assert_close(got[number].double(), expected[number], rtol=1e-4, atol=1e-4)
            assert (rounded[number].double() - expected[number]).abs().max() > 1e-3
        for number in (3, 4):
            assert got[number].dtype == torch.bfloat16
            error = (got[number].double() - expected[number]).norm() / expected[number].norm()
            assert error < 2**-8

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_no_positions_gives_empty_gradients(self, dtype: torch.dtype) -> None:
        case, (hidden, weight) = cached_case(1.0).rows(0), make_inputs(dtype)
        empty = hidden.detach()[:0].requires_grad_()
        query = make_query(case, 1.0)
        result = finish(compute_log_stats_from_hidden(empty, weight, query), case, query, empty, weight)
        assert result[0].shape == (0,) and result[3].shape == empty.shape and (result[4] == 0).all()

    def test_frozen_factor_gets_no_gradient(self) -> None:
        case, (hidden, weight) = cached_case(1.0), make_inputs(torch.float32)
        query, expected = make_query(case, 1.0), unfused(torch.float32, 1.0)
        for frozen, other, number in ((weight, hidden, 3), (hidden, weight, 4)):
            frozen.requires_grad_(False)
            stats = compute_log_stats_from_hidden(hidden, weight, query)
            values_T = loss_of(stats, case, query) + 0.5 * stats.sampled_logp_T - 0.25 * stats.entropy_T
            total = (values_T * row_weights(len(values_T)).float()).sum()
            grad = torch.autograd.grad(total, other)[0]
            torch.testing.assert_close(grad, expected[number], rtol=1e-5, atol=1e-5)
            frozen.requires_grad_(True)

    def test_second_backward_gives_same_gradients(self) -> None:
        case, (hidden, weight) = cached_case(1.0), make_inputs(torch.float32)
        stats = compute_log_stats_from_hidden(hidden, weight, make_query(case, 1.0), chunk_tokens=4)
        first = torch.autograd.grad(stats.sampled_logp_T.sum(), (hidden, weight), retain_graph=True)
        second = torch.autograd.grad(stats.sampled_logp_T.sum(), (hidden, weight))
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])

    def test_backward_computes_logits_of_all_blocks_but_the_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case, (hidden, weight) = cached_case(1.0), make_inputs(torch.float32)
        n_rows = []
        product = torch.mm

        def counting_mm(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
            n_rows.append(len(left))
            return product(left, right, out=out)

        monkeypatch.setattr(torch, "mm", counting_mm)
        stats = compute_log_stats_from_hidden(hidden, weight, make_query(case, 1.0), chunk_tokens=4)
        first, blocks = len(hidden) % 4, len(hidden) // 4
        assert first and n_rows == [first, *[4] * blocks]
        torch.autograd.grad(stats.sampled_logp_T.sum(), (hidden, weight))
        assert n_rows[1 + blocks :] == [*[4] * (blocks - 1), first]

    def test_all_blocks_share_one_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case, (hidden, weight) = cached_case(1.0), make_inputs(torch.float32)
        memories: list[int] = []
        product = torch.mm

        def recording_mm(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
            memories.append(out.data_ptr())
            return product(left, right, out=out)

        monkeypatch.setattr(torch, "mm", recording_mm)
        stats = compute_log_stats_from_hidden(hidden, weight, make_query(case, 1.0), chunk_tokens=4)
        torch.autograd.grad(stats.sampled_logp_T.sum(), (hidden, weight))
        assert len(memories) > 4 and len(set(memories)) == 1

    def test_weight_gradient_added_in_slices_is_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = fused(torch.bfloat16, 1.0, 5)
        monkeypatch.setattr(fused_head, "CPU_CHUNK_ELEMENTS", 100)
        assert torch.equal(fused(torch.bfloat16, 1.0, 5)[4], expected[4])
