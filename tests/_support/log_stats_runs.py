"""Runs of the student statistics, in this process or on one rank of a tensor-parallel group, and their reference."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.commands.gpu_smoke.reference import dense_log_stats
from recipe_gkd.losses.distributions import valid_entries
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats
from tests._support.loss_cases import ROWS, TEMPERATURES, VOCABULARY, Case, make_case, row_weights

# Support size, temperature, and whether the loss differentiates the entropy.
RUNS = [
    (k, temperature, differentiates_entropy)
    for k in (0, 5, VOCABULARY)
    for temperature in TEMPERATURES
    for differentiates_entropy in (False, True)
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def make_query(case: Case, temperature: float, differentiates_entropy: bool = False) -> LogitsQuery:
    """Sample ids inside and outside the support, the likeliest and the least likely, of every rank's columns."""
    n_rows = len(case.logits_TW)
    sampled = torch.randint(VOCABULARY, (n_rows,), generator=torch.Generator().manual_seed(n_rows))
    sampled[0] = VOCABULARY - 1
    sampled[1] = case.ids_TK[1, 0] if case.ids_TK.shape[1] else 0
    sampled[ROWS.index("far apart")] = case.logits_TW[ROWS.index("far apart"), :VOCABULARY].argmax()
    sampled[ROWS.index("student certain of one id")] = 40
    return LogitsQuery(
        ids_TK=case.ids_TK,
        valid_TK=valid_entries(case.logps_TK, case.ids_TK, VOCABULARY),
        sampled_T=sampled,
        vocab_size=VOCABULARY,
        temperature=temperature,
        entropy_has_gradient=differentiates_entropy,
    )


@functools.cache
def cached_case(k: int, temperature: float) -> Case:
    return make_case(k, temperature)


def scalar(log_q_TB: Tensor, sampled_logp_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Return a bounded function of all statistics, so that the extreme rows do not dominate."""
    weights_T = row_weights(len(sampled_logp_T)).to(sampled_logp_T.dtype)
    values_T = log_q_TB.exp().square().sum(1) + 0.5 * sampled_logp_T
    if entropy_T.requires_grad:
        values_T = values_T + 0.7 * entropy_T
    return (values_T * weights_T).sum()


def stats_and_gradient(
    k: int,
    temperature: float,
    differentiates_entropy: bool,
    dtype: torch.dtype,
    chunk_tokens: int | None,
    tp_group: ProcessGroup | None = None,
    **options: Any,
) -> tuple[StudentLogStats, Tensor]:
    case = cached_case(k, temperature)
    shards = (case.logits_TW,) if tp_group is None else case.logits_TW.chunk(tp_group.size(), dim=1)
    leaf = shards[0 if tp_group is None else tp_group.rank()].to(dtype, copy=True).requires_grad_()
    query = make_query(case, temperature, differentiates_entropy)
    stats = compute_log_stats(leaf, query, tp_group=tp_group, chunk_tokens=chunk_tokens, **options)
    assert stats.entropy_T.requires_grad == differentiates_entropy
    scalar(stats.log_mass_TB.log_softmax(1), stats.sampled_logp_T, stats.entropy_T).backward()
    assert leaf.grad is not None
    return stats, leaf.grad


def as_results(stats: StudentLogStats, grad: Tensor) -> tuple[Tensor, ...]:
    log_q_TB = stats.log_mass_TB.detach().log_softmax(1)
    return log_q_TB, stats.sampled_logp_T.detach(), stats.entropy_T.detach(), grad


@functools.cache
def dense_results(k: int, temperature: float, differentiates_entropy: bool) -> tuple[Tensor, ...]:
    case = cached_case(k, temperature)
    query = make_query(case, temperature)
    logits = case.logits_TW.double().requires_grad_()
    stats = dense_log_stats(logits, query)
    entropy_T = stats.entropy_T if differentiates_entropy else stats.entropy_T.detach()
    scalar(stats.log_mass_TB, stats.sampled_logp_T, entropy_T).backward()
    assert logits.grad is not None
    return as_results(stats, logits.grad)


def check(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    names = ("log q of the buckets", "sampled log-probability", "entropy", "gradient")
    for name, one, other in zip(names, got, expected, strict=True):
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        if name == "gradient" and dtype == torch.bfloat16:
            tolerance = 1e-2
        is_near = (one.double() - other).abs() <= tolerance * (1 + other.abs())
        wrong = ~is_near & (one != other)  # -inf equals -inf
        assert not wrong.any(), f"{name}: got {one[wrong]}, expected {other[wrong]}"
    assert (got[-1][:, VOCABULARY:] == 0).all()
