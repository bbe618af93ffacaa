"""Runs of the fused output layer, in this process or on one rank of a tensor-parallel group, and their reference."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses import Divergence
from recipe_gkd.losses.distributions import bucketed_distributions, valid_entries
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats
from tests._support.loss_cases import COLUMNS, VOCABULARY, Case, make_case, row_weights

HIDDEN = 24
K = 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RUNS = [
    (dtype, temperature, chunk_tokens)
    for dtype in DTYPES
    for temperature in (1.0, 2.0)
    for chunk_tokens in (None, 1, 5)  # one block, or blocks of which the first is not full
]

# Divergence, sampled log-probability, entropy, gradient in the hidden states, gradient in the weight.
Result = tuple[Tensor, ...]


@functools.cache
def cached_case(temperature: float) -> Case:
    return make_case(K, temperature)


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (len(cached_case(1.0).logits_TW), COLUMNS))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def make_query(case: Case, temperature: float) -> LogitsQuery:
    return LogitsQuery(
        ids_TK=case.ids_TK,
        valid_TK=valid_entries(case.logps_TK, case.ids_TK, VOCABULARY),
        sampled_T=7 * torch.arange(len(case.ids_TK)) % VOCABULARY,
        vocab_size=VOCABULARY,
        temperature=temperature,
        entropy_has_gradient=True,
    )


def loss_of(stats: StudentLogStats, case: Case, query: LogitsQuery) -> Tensor:
    buckets = bucketed_distributions(stats.log_mass_TB, case.logps_TK, query.valid_TK, "bucket")
    return Divergence(kind="kl_rkl")(buckets)


def finish(stats: StudentLogStats, case: Case, query: LogitsQuery, hidden: Tensor, weight: Tensor) -> Result:
    loss_T = loss_of(stats, case, query)
    weights_T = row_weights(len(loss_T)).to(loss_T.dtype)
    total = ((loss_T + 0.5 * stats.sampled_logp_T - 0.25 * stats.entropy_T) * weights_T).sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    return loss_T.detach(), stats.sampled_logp_T.detach(), stats.entropy_T.detach(), *grads


@functools.cache
def unfused(dtype: torch.dtype, temperature: float) -> Result:
    case, (hidden, weight) = cached_case(temperature), make_inputs(dtype)
    query = make_query(case, temperature)
    return finish(compute_log_stats(hidden @ weight.T, query), case, query, hidden, weight)


def fused(
    dtype: torch.dtype,
    temperature: float,
    chunk_tokens: int | None,
    tp_group: ProcessGroup | None = None,
    **options: Any,
) -> Result:
    case, (hidden, weight) = cached_case(temperature), make_inputs(dtype)
    if tp_group is not None:
        weight = weight.detach().chunk(tp_group.size())[tp_group.rank()].clone().requires_grad_()
    query = make_query(case, temperature)
    stats = compute_log_stats_from_hidden(
        hidden, weight, query, tp_group=tp_group, chunk_tokens=chunk_tokens, **options
    )
    return finish(stats, case, query, hidden, weight)


def check(got: Result, expected: Result, dtype: torch.dtype) -> None:
    """In bfloat16 the matrix products round their sums, which blocks and ranks add in different orders."""
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        is_gradient = number > 2
        atol = 2e-2 * float(other.abs().max()) if dtype == torch.bfloat16 and is_gradient else tolerance
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=atol)
    assert (got[-1][VOCABULARY:] == 0).all(), "the padding has a gradient"
