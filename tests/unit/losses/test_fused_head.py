"""From hidden states and the output layer: the same as from the logits, in value and in both gradients."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses import Divergence
from recipe_gkd.losses.distributions import distributions, valid_entries
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats
from tests._support.worker_pool import WorkerPool
from tests.unit.losses.cases import COLUMNS, VOCABULARY, Case, make_case, row_weights
from tests.unit.losses.runs import group

HIDDEN = 24
K = 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RUNS = [
    (dtype, temperature, chunk_tokens)
    for dtype in DTYPES
    for temperature in (1.0, 2.0)
    for chunk_tokens in (None, 1, 5)  # one block, or several, the last of which is not full
]

Result = tuple[Tensor, ...]
"""Divergence, picked log-probability, entropy, gradient in the hidden states, in the weight."""


@functools.cache
def case_of(temperature: float) -> Case:
    return make_case(K, temperature)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (len(case_of(1.0).logits_TW), COLUMNS))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def question_of(case: Case, temperature: float) -> LogitsQuery:
    return LogitsQuery(
        ids_TK=case.ids_TK,
        valid_TK=valid_entries(case.logps_TK, case.ids_TK, VOCABULARY),
        sampled_T=7 * torch.arange(len(case.ids_TK)) % VOCABULARY,
        vocab_size=VOCABULARY,
        temperature=temperature,
    )


def finish(stats: StudentLogStats, case: Case, query: LogitsQuery, hidden: Tensor, weight: Tensor) -> Result:
    of_buckets = distributions(stats.log_mass_TB, case.logps_TK, query.valid_TK, "bucket")
    loss_T = Divergence(kind="kl_rkl").of(of_buckets)
    total = ((loss_T + 0.5 * stats.sampled_logp_T) * row_weights(len(loss_T)).to(loss_T.dtype)).sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    return loss_T.detach(), stats.sampled_logp_T.detach(), stats.entropy_T, *grads


@functools.cache
def unfused(dtype: torch.dtype, temperature: float) -> Result:
    case, (hidden, weight) = case_of(temperature), inputs(dtype)
    query = question_of(case, temperature)
    return finish(compute_log_stats(hidden @ weight.T, query), case, query, hidden, weight)


def fused(
    dtype: torch.dtype, temperature: float, chunk_tokens: int | None, tp_group: ProcessGroup | None = None
) -> Result:
    case, (hidden, weight) = case_of(temperature), inputs(dtype)
    if tp_group is not None:
        weight = weight.detach().chunk(tp_group.size())[tp_group.rank()].clone().requires_grad_()
    query = question_of(case, temperature)
    stats = compute_log_stats_from_hidden(hidden, weight, query, tp_group=tp_group, chunk_tokens=chunk_tokens)
    return finish(stats, case, query, hidden, weight)


def check(got: Result, want: Result, dtype: torch.dtype) -> None:
    """In bfloat16 the matrix products round their sums, which blocks and ranks add up in another order."""
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        of_gradients = 2e-2 * float(other.abs().max()) if dtype == torch.bfloat16 and number > 2 else tolerance
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=of_gradients)
    assert (got[-1][VOCABULARY:] == 0).all(), "the padding has a gradient"


@pytest.mark.parametrize("dtype, temperature, chunk_tokens", RUNS)
def test_fused_equals_unfused(dtype: torch.dtype, temperature: float, chunk_tokens: int | None) -> None:
    got = fused(dtype, temperature, chunk_tokens)
    assert got[3].dtype == got[4].dtype == dtype
    check(got, unfused(dtype, temperature), dtype)


def shard(rank: int, world_size: int, port: int) -> list[list[np.ndarray]]:
    with group(rank, world_size, port) as tp_group:
        return [[part.double().numpy() for part in fused(*run, tp_group)] for run in RUNS]


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_tensor_parallel_size_gives_the_whole_gradients(pool: WorkerPool, world_size: int) -> None:
    ranks = pool.run(world_size, shard)
    for number, (dtype, temperature, _) in enumerate(RUNS):
        grad_weight = np.concatenate([results[number][-1] for results in ranks])
        for results in ranks:
            got = tuple(torch.from_numpy(part) for part in (*results[number][:-1], grad_weight))
            check(got, unfused(dtype, temperature), dtype)


def test_no_positions_have_empty_gradients() -> None:
    case, (hidden, weight) = case_of(1.0).rows(0), inputs(torch.float32)
    none = hidden.detach()[:0].requires_grad_()
    query = question_of(case, 1.0)
    result = finish(compute_log_stats_from_hidden(none, weight, query), case, query, none, weight)
    assert result[0].shape == (0,) and result[3].shape == none.shape and (result[4] == 0).all()


def test_frozen_output_layer_or_frozen_trunk_get_no_gradient() -> None:
    case, (hidden, weight) = case_of(1.0), inputs(torch.float32)
    query, want = question_of(case, 1.0), unfused(torch.float32, 1.0)
    for frozen, other, number in ((weight, hidden, 3), (hidden, weight, 4)):
        frozen.requires_grad_(False)
        stats = compute_log_stats_from_hidden(hidden, weight, query)
        loss_T = Divergence(kind="kl_rkl").of(distributions(stats.log_mass_TB, case.logps_TK, query.valid_TK, "bucket"))
        total = (loss_T + 0.5 * stats.sampled_logp_T) * row_weights(len(loss_T)).float()
        torch.testing.assert_close(torch.autograd.grad(total.sum(), other)[0], want[number], rtol=1e-5, atol=1e-5)
        frozen.requires_grad_(True)


def test_backward_twice_gives_the_same_gradients() -> None:
    case, (hidden, weight) = case_of(1.0), inputs(torch.float32)
    stats = compute_log_stats_from_hidden(hidden, weight, question_of(case, 1.0), chunk_tokens=4)
    first = torch.autograd.grad(stats.sampled_logp_T.sum(), (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(stats.sampled_logp_T.sum(), (hidden, weight))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
