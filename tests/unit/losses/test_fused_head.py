"""Statistics from hidden states and the output layer equal those from logits, in value and in both gradients."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
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

    def test_no_positions_gives_empty_gradients(self) -> None:
        case, (hidden, weight) = cached_case(1.0).rows(0), make_inputs(torch.float32)
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
