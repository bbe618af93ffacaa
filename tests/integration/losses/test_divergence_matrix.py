"""Value and gradient of every divergence against dense float64 autograd.

The matrix is divergence x tail mode x K x temperature x dtype x tensor-parallel size, with and without chunks of
positions and in-place gradients. The rows of each case are the edge cases of ``cases.ROWS``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import Divergence
from tests._support.loss_cases import ROWS, SUPPORT_SIZES, VOCABULARY, divergences, make_case, matrix
from tests._support.loss_runs import (
    Result,
    cached_case,
    dense_loss_and_gradient,
    dense_of_matrix,
    loss_and_gradient,
    matrix_shard,
)
from tests._support.worker_pool import WorkerPool

# Tolerances of value and gradient. bfloat16 logits are computed in float32, and their gradient is rounded once.
TOLERANCES = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 1e-2)}

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def check(got: Result, expected: Result, dtype: torch.dtype, divergence: Divergence, label: str) -> None:
    """Assert all properties that hold for every divergence."""
    label = f"{label}, {divergence}"
    value_tolerance, gradient_tolerance = TOLERANCES[dtype]
    assert_near(got[0], expected[0], value_tolerance, f"{label}: value")
    if divergence.kind == "tvd":  # it is not differentiable at its minimum
        got, expected = (without_row("student equals teacher", *result) for result in (got, expected))
    assert_near(got[1], expected[1], gradient_tolerance, f"{label}: gradient")
    # Every divergence is a function of softmax(logits), so the gradient of a row sums to zero.
    sums_T = got[1].double().sum(1) / (1 + got[1].double().abs().sum(1))
    assert_near(sums_T, torch.zeros_like(sums_T), gradient_tolerance, f"{label}: sum of the gradient")
    assert (got[1][:, VOCABULARY:] == 0).all(), f"{label}: the padding has a gradient"


def without_row(name: str, loss: Tensor, grad: Tensor) -> Result:
    other = torch.tensor([row != name for row in ROWS[: len(grad)]])
    return loss, grad * other[:, None]


def assert_near(got: Tensor, expected: Tensor, tolerance: float, label: str) -> None:
    wrong = ~((got.double() - expected).abs() <= tolerance * (1 + expected.abs()))  # also catches nan
    if indices := wrong.nonzero().tolist():
        first = tuple(indices[0])
        raise AssertionError(
            f"{label}, row {ROWS[first[0]]!r}, {first}: got {got[first]}, expected {expected[first]}; "
            f"{len(indices)} in total"
        )


class TestMatrix:
    @DTYPES
    @pytest.mark.parametrize("k", SUPPORT_SIZES)
    def test_single_process_equals_dense_float64(self, k: int, dtype: torch.dtype) -> None:
        for _, divergence in (entry for entry in matrix() if entry[0] == k):
            case = cached_case(k, divergence.temperature)
            for chunk_tokens, in_place in ((None, False), (5, True)):
                got = loss_and_gradient(case, divergence, dtype, chunk_tokens, in_place)
                check(got, dense_of_matrix(k, divergence), dtype, divergence, f"chunks {chunk_tokens}")

    @pytest.mark.parametrize(
        ("world_size", "dtype"),
        [
            pytest.param(size, dtype, marks=() if size == 2 and dtype == torch.float64 else pytest.mark.slow)
            for size in (2, 4)
            for dtype in TOLERANCES
        ],
    )
    def test_tensor_parallel_equals_dense_float64(self, pool: WorkerPool, world_size: int, dtype: torch.dtype) -> None:
        ranks = [[torch.from_numpy(part) for part in parts] for parts in pool.run(world_size, matrix_shard, dtype)]
        for number, (k, divergence) in enumerate(matrix()):
            grad = torch.cat([grads[number] for _, grads in ranks], dim=1)
            for losses, _ in ranks:
                assert torch.equal(losses[number], ranks[0][0][number]), "the ranks have different values"
            check((ranks[0][0][number], grad), dense_of_matrix(k, divergence), dtype, divergence, f"K = {k}")


class TestEdgeCases:
    @pytest.mark.parametrize("temperature", [0.3, 0.7, 1.7])
    def test_inexact_temperature_equals_dense_float64(self, temperature: float) -> None:
        """The rows of huge logits are excluded, because their quotients have their own rounding error."""
        case = make_case(17, temperature).rows(3)
        for divergence in divergences(temperature):
            got, expected = loss_and_gradient(case, divergence), dense_loss_and_gradient(case, divergence)
            check(got, expected, torch.float32, divergence, "one process")

    def test_no_positions_gives_empty_loss_and_gradient(self) -> None:
        case = make_case(17, 1.0).rows(0)
        for divergence in divergences() + divergences(2.0):
            for in_place in (False, True):
                loss, grad = loss_and_gradient(case, divergence, in_place=in_place)
                assert loss.shape == (0,) and grad.shape == (0, case.logits_TW.shape[1])

    def test_student_tail_of_exp_minus_200_has_gradient(self) -> None:
        """1 - sum(q) is 0 in every float dtype; the logarithm of the tail is not."""
        case = make_case(1, 1.0).rows(1)
        case.logits_TW[:] = -100.0
        case.logits_TW[0, 0] = 100.0
        case.ids_TK[:], case.logps_TK[:] = 0, torch.tensor(0.9).log()
        got = loss_and_gradient(case, Divergence())
        check(got, dense_loss_and_gradient(case, Divergence()), torch.float32, Divergence(), "tail of e^-200")
        assert got[0].item() > 15
