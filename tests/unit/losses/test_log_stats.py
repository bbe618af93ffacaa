"""What is read of the logits: buckets at one temperature, the picked id and the entropy at temperature 1."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.distributions import valid_entries
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats
from tests._support.worker_pool import WorkerPool
from tests.unit.losses.cases import COLUMNS, ROWS, TEMPERATURES, VOCABULARY, Case, make_case, row_weights
from tests.unit.losses.dense import dense_picked_and_entropy
from tests.unit.losses.runs import group

ALL = [(k, temperature) for k in (0, 5, VOCABULARY) for temperature in TEMPERATURES]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def question_of(case: Case, temperature: float) -> LogitsQuery:
    """Picked: ids in the support and off it, the likeliest and the least likely, of every rank's columns."""
    rows = len(case.logits_TW)
    picked = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(rows))
    picked[0] = VOCABULARY - 1
    picked[1] = case.ids_TK[1, 0] if case.ids_TK.shape[1] else 0
    picked[ROWS.index("far apart")] = case.logits_TW[ROWS.index("far apart"), :VOCABULARY].argmax()
    picked[ROWS.index("student sure of one id")] = 40
    return LogitsQuery(
        ids_TK=case.ids_TK,
        valid_TK=valid_entries(case.logps_TK, case.ids_TK, VOCABULARY),
        sampled_T=picked,
        vocab_size=VOCABULARY,
        temperature=temperature,
    )


@functools.cache
def case_of(k: int, temperature: float) -> Case:
    return make_case(k, temperature)


def scalar(log_q_TB: Tensor, sampled_logp_T: Tensor) -> Tensor:
    """Something that depends on both: bounded functions, so that the extreme rows do not drown the others."""
    weights_T = row_weights(len(sampled_logp_T)).to(sampled_logp_T.dtype)
    return ((log_q_TB.exp().square().sum(1) + 0.5 * sampled_logp_T) * weights_T).sum()


def reading_and_gradient(
    k: int, temperature: float, dtype: torch.dtype, chunk_tokens: int | None, tp_group: ProcessGroup | None = None
) -> tuple[StudentLogStats, Tensor]:
    case = case_of(k, temperature)
    shards = (case.logits_TW,) if tp_group is None else case.logits_TW.chunk(tp_group.size(), dim=1)
    leaf = shards[0 if tp_group is None else tp_group.rank()].to(dtype, copy=True).requires_grad_()
    stats = compute_log_stats(leaf, question_of(case, temperature), tp_group=tp_group, chunk_tokens=chunk_tokens)
    scalar(stats.log_mass_TB.log_softmax(1), stats.sampled_logp_T).backward()
    assert leaf.grad is not None and not stats.entropy_T.requires_grad
    return stats, leaf.grad


@functools.cache
def dense(k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log q of the buckets, picked log-probabilities, entropy, gradient."""
    case = case_of(k, temperature)
    query = question_of(case, temperature)
    logits = case.logits_TW.double().requires_grad_()
    rows = []
    for logits_V, ids_K, present_K in zip(logits[:, :VOCABULARY], query.ids_TK, query.valid_TK, strict=True):
        log_q_V = (logits_V / temperature).log_softmax(0)
        ids = [id if there else None for id, there in zip(ids_K.tolist(), present_K.tolist(), strict=True)]
        off = sorted(set(range(VOCABULARY)) - {id for id in ids if id is not None})
        nothing = log_q_V.new_tensor(-torch.inf)
        entries = [nothing if id is None else log_q_V[id] for id in ids]
        rows.append(torch.stack([*entries, log_q_V[off].logsumexp(0) if off else nothing]))
    log_q_TB = torch.stack(rows)
    sampled_T, entropy_T = dense_picked_and_entropy(logits, query.sampled_T, VOCABULARY)
    scalar(log_q_TB, sampled_T).backward()
    assert logits.grad is not None
    return log_q_TB.detach(), sampled_T.detach(), entropy_T.detach(), logits.grad


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    names = ("log q of the buckets", "picked log-probability", "entropy", "gradient")
    for name, one, other in zip(names, got, want, strict=True):
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        if name == "gradient" and dtype == torch.bfloat16:
            tolerance = 1e-2
        wrong = ~((one.double() - other).abs() <= tolerance * (1 + other.abs())) & (
            one != other
        )  # -inf is equal to -inf
        assert not wrong.any(), f"{name}: got {one[wrong]}, expected {other[wrong]}"
    assert (got[-1][:, VOCABULARY:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k, temperature", ALL)
def test_reading_equals_dense_float64(k: int, temperature: float, dtype: torch.dtype) -> None:
    for chunk_tokens in (None, 1, 4):
        stats, grad = reading_and_gradient(k, temperature, dtype, chunk_tokens)
        got = (stats.log_mass_TB.detach().log_softmax(1), stats.sampled_logp_T.detach(), stats.entropy_T, grad)
        check(got, dense(k, temperature), dtype)


def shard(rank: int, world_size: int, port: int) -> list[list[np.ndarray]]:
    with group(rank, world_size, port) as tp_group:
        results = []
        for k, temperature in ALL:
            for dtype in DTYPES:
                stats, grad = reading_and_gradient(k, temperature, dtype, 6, tp_group)
                log_q_TB = stats.log_mass_TB.detach().log_softmax(1)
                parts = (log_q_TB, stats.sampled_logp_T.detach(), stats.entropy_T, grad)
                results.append([part.double().numpy() for part in parts])
        return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_reading_of_any_tensor_parallel_size_equals_dense_float64(pool: WorkerPool, world_size: int) -> None:
    ranks = pool.run(world_size, shard)
    runs = [(k, temperature, dtype) for k, temperature in ALL for dtype in DTYPES]
    for number, (k, temperature, dtype) in enumerate(runs):
        grad = np.concatenate([results[number][-1] for results in ranks], axis=1)
        for results in ranks:
            got = tuple(torch.from_numpy(part) for part in (*results[number][:-1], grad))
            check(got, dense(k, temperature), dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_reading_keeps_its_digits_at_large_logits(temperature: float) -> None:
    """An offset of all logits changes nothing in float64; temperatures that are powers of two would hide an error."""
    generator = torch.Generator().manual_seed(0)
    logits_TW = (3 * torch.randn(32, COLUMNS, generator=generator, dtype=torch.float64) + 3e4).float()
    ids_TK = torch.randn(32, VOCABULARY, generator=generator).argsort(1)[:, :8]
    query = LogitsQuery(
        ids_TK=ids_TK,
        valid_TK=torch.ones_like(ids_TK, dtype=torch.bool),
        sampled_T=ids_TK[:, 0],
        vocab_size=VOCABULARY,
        temperature=temperature,
    )
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits_TW.to(dtype, copy=True).requires_grad_()
        stats = compute_log_stats(leaf, query)
        log_q_TB = stats.log_mass_TB.log_softmax(1)
        scalar(log_q_TB, stats.sampled_logp_T).backward()
        results.append((log_q_TB.detach(), stats.sampled_logp_T.detach(), stats.entropy_T, leaf.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_chunks_of_positions_change_nothing() -> None:
    for k, temperature in ((5, 1.0), (5, 2.0)):
        whole, grad = reading_and_gradient(k, temperature, torch.float32, None)
        for chunk_tokens in (1, 2, 3, len(ROWS) - 1, len(ROWS), 1000):
            chunked, chunked_grad = reading_and_gradient(k, temperature, torch.float32, chunk_tokens)
            assert torch.equal(grad, chunked_grad)
            for name in ("log_mass_TB", "sampled_logp_T", "entropy_T"):
                assert torch.equal(getattr(whole, name), getattr(chunked, name)), name
