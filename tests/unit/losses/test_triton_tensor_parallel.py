"""The Triton kernels through autograd, on two tensor-parallel ranks in Triton's interpreter.

Kinds of shards: without padding, with padding in one of them, with one real column, and with padding only.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.commands.gpu_smoke.reference import dense_sampled_and_entropy
from recipe_gkd.losses import Divergence
from recipe_gkd.losses.distributions import bucketed_distributions, valid_entries
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery
from tests._support import fused_head_runs as fused_head
from tests._support import log_stats_runs as log_stats
from tests._support.dense_losses import dense_divergence
from tests._support.loss_cases import divergences, row_weights
from tests._support.loss_runs import process_group
from tests._support.triton_interpreter import Run

pytest.importorskip("triton", reason="needs triton")

WIDTH = 4100
"""Columns of a shard: one block and 4 columns."""
VOCABULARIES = (2 * WIDTH, 2 * WIDTH - 100, WIDTH + 1, WIDTH, WIDTH - 1)
K = 6
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A loss on a vocabulary."""

    vocab_size: int
    divergence: Divergence
    dtype: torch.dtype
    in_place: bool


SETTINGS = [
    Setting(
        vocab_size=VOCABULARIES[number % 5],
        divergence=replace(divergence, temperature=(2.0, 1.0)[number // 10 % 2]),
        dtype=DTYPES[number % 2],
        in_place=number % 3 == 0,
    )
    for number, divergence in enumerate(divergences())
]
"""Every divergence once. Every vocabulary occurs with both temperatures and both types of logits."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Logits of all shards, float32 with values of bfloat16, the teacher's entries, and sampled tokens."""

    logits_TV: Tensor
    ids_TK: Tensor
    logps_TK: Tensor
    sampled_T: Tensor


@functools.cache
def make_inputs(vocab_size: int) -> Inputs:
    """Return one row for each situation of the ids: see the comments."""
    generator = torch.Generator().manual_seed(vocab_size)
    border, last = min(WIDTH, vocab_size - 3), vocab_size - 1
    ids_TK = torch.tensor(
        [
            [0, 1, 31, 32, 33, 4095],  # all on the first rank
            [last, last - 1, last - 2, 2, 3, 4],  # the last ids
            [border - 3, border - 2, border - 1, border, border + 1, border + 2],  # around the border of the shards
            [WIDTH - 1, WIDTH, WIDTH + 31, WIDTH + 32, 2 * WIDTH - 1, 0],  # of the second rank, if they exist
            [-1, vocab_size, 2 * WIDTH - 1, 2 * WIDTH, 3 * WIDTH, 7],  # ids that the student does not have
            [5, 4096, 4097, 4098, 17, 64],  # after a block
            [0, 0, 0, 0, 0, 0],  # no entry
            [40, 41, 42, 43, 44, 45],  # the student is certain of an id of the tail
        ]
    )
    n_rows = len(ids_TK)
    logps_TK = torch.randn(n_rows, K + 1, generator=generator).mul(2).log_softmax(1)[:, :K].contiguous()
    logps_TK[6] = -torch.inf
    logits_TV = torch.randn(n_rows, 2 * WIDTH, generator=generator) * 3
    logits_TV[1, :100] = 1e4
    logits_TV[7] = -1e4
    logits_TV[7, border] = 1e4
    logits_TV[:, vocab_size:] = 1e4  # must be ignored
    return Inputs(
        logits_TV=logits_TV.bfloat16().float(),
        ids_TK=ids_TK,
        logps_TK=logps_TK,
        sampled_T=torch.tensor([31, last, border - 1, border, 7, 4090, 0, border]),
    )


def loss_on_rank(rank: int, world_size: int, port: int, settings: list[Setting]) -> list[list[np.ndarray]]:
    with process_group(rank, world_size, port) as tp_group:
        return [[part.double().numpy() for part in loss_and_gradient(setting, tp_group)] for setting in settings]


def loss_and_gradient(setting: Setting, tp_group: ProcessGroup) -> tuple[Tensor, ...]:
    """Return divergence, sampled log-probability, entropy, and the gradient in this rank's logits."""
    inputs = make_inputs(setting.vocab_size)
    query = LogitsQuery(
        ids_TK=inputs.ids_TK,
        valid_TK=valid_entries(inputs.logps_TK, inputs.ids_TK, setting.vocab_size),
        sampled_T=inputs.sampled_T,
        vocab_size=setting.vocab_size,
        temperature=setting.divergence.temperature,
        entropy_has_gradient=True,
    )
    leaf = inputs.logits_TV.chunk(tp_group.size(), dim=1)[tp_group.rank()].to(setting.dtype).clone().requires_grad_()
    stats = compute_log_stats(leaf * 1, query, tp_group=tp_group, in_place=setting.in_place, kernel_backend="triton")
    buckets = bucketed_distributions(stats.log_mass_TB, inputs.logps_TK, query.valid_TK, setting.divergence.tail)
    results = setting.divergence(buckets), stats.sampled_logp_T, stats.entropy_T
    (gradient,) = torch.autograd.grad(total(*results), leaf)
    return *(result.detach() for result in results), gradient


def dense_results(setting: Setting) -> tuple[Tensor, ...]:
    inputs = make_inputs(setting.vocab_size)
    logits = inputs.logits_TV.double().requires_grad_()
    loss_T = dense_divergence(logits, inputs.logps_TK, inputs.ids_TK, setting.divergence, setting.vocab_size)
    results = loss_T, *dense_sampled_and_entropy(logits, inputs.sampled_T, setting.vocab_size)
    (gradient,) = torch.autograd.grad(total(*results), logits)
    return *(result.detach() for result in results), gradient


def total(loss_T: Tensor, sampled_logp_T: Tensor, entropy_T: Tensor) -> Tensor:
    weights_T = row_weights(len(loss_T)).to(loss_T.dtype)
    return ((loss_T + 0.5 * sampled_logp_T - 0.25 * entropy_T) * weights_T).sum()


def check_settings(interpreted_ranks: Run, settings: list[Setting]) -> None:
    ranks = interpreted_ranks(loss_on_rank, settings)
    for setting, *results in zip(settings, *ranks, strict=True):
        *expected, expected_gradient = dense_results(setting)
        for *found, _ in results:
            for name, one, other in zip(("divergence", "log-probability", "entropy"), found, expected, strict=True):
                assert_near(one, other, 1e-5, f"{name} of {setting}")
        gradient = np.concatenate([parts[-1] for parts in results], axis=1)
        assert_near(gradient, expected_gradient, 2**-7 if setting.dtype == torch.bfloat16 else 1e-4, str(setting))
        assert not gradient[:, setting.vocab_size :].any(), f"the padding has a gradient: {setting}"


def assert_near(found: np.ndarray, expected: Tensor, rtol: float, label: str) -> None:
    torch.testing.assert_close(
        torch.from_numpy(found), expected, rtol=rtol, atol=2e-6, msg=lambda message: f"{label}: {message}"
    )


@pytest.mark.parametrize(
    "vocab_size", [*(pytest.param(each, marks=pytest.mark.slow) for each in VOCABULARIES[:2]), *VOCABULARIES[2:]]
)
def test_loss_on_two_shards_equals_dense_float64(interpreted_ranks: Run, vocab_size: int) -> None:
    check_settings(interpreted_ranks, [setting for setting in SETTINGS if setting.vocab_size == vocab_size])


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_every_loss_on_two_shards_equals_dense_float64(interpreted_ranks: Run, vocab_size: int) -> None:
    settings = [
        Setting(vocab_size=vocab_size, divergence=divergence, dtype=DTYPES[number % 2], in_place=number % 3 == 0)
        for temperature in (1.0, 2.0)
        for number, divergence in enumerate(divergences(temperature), start=int(temperature))
    ]
    check_settings(interpreted_ranks, settings)


LOG_STATS_RUNS = list(zip(log_stats.RUNS, itertools.cycle((*DTYPES, *reversed(DTYPES))), strict=False))
FUSED_HEAD_RUNS = [run for run in fused_head.RUNS if run[0] in DTYPES and run[2] != 1]


def log_stats_on_rank(rank: int, world_size: int, port: int) -> list[list[np.ndarray]]:
    with process_group(rank, world_size, port) as tp_group:
        return [
            [part.double().numpy() for part in log_stats.as_results(*results)]
            for run, dtype in LOG_STATS_RUNS
            for results in [log_stats.stats_and_gradient(*run, dtype, None, tp_group, kernel_backend="triton")]
        ]


@pytest.mark.slow
def test_log_stats_equal_dense_float64(interpreted_ranks: Run) -> None:
    ranks = interpreted_ranks(log_stats_on_rank)
    for number, (run, dtype) in enumerate(LOG_STATS_RUNS):
        grad = np.concatenate([results[number][-1] for results in ranks], axis=1)
        for results in ranks:
            got = tuple(torch.from_numpy(part) for part in (*results[number][:-1], grad))
            log_stats.check(got, log_stats.dense_results(*run), dtype)


def fused_head_on_rank(rank: int, world_size: int, port: int) -> list[list[np.ndarray]]:
    with process_group(rank, world_size, port) as tp_group:
        return [
            [part.double().numpy() for part in fused_head.fused(*run, tp_group, kernel_backend="triton")]
            for run in FUSED_HEAD_RUNS
        ]


@pytest.mark.slow
def test_fused_head_equals_unfused(interpreted_ranks: Run) -> None:
    ranks = interpreted_ranks(fused_head_on_rank)
    for number, (dtype, temperature, _) in enumerate(FUSED_HEAD_RUNS):
        grad_weight = np.concatenate([results[number][-1] for results in ranks])
        for results in ranks:
            got = tuple(torch.from_numpy(part) for part in (*results[number][:-1], grad_weight))
            fused_head.check(got, fused_head.unfused(dtype, temperature), dtype)
