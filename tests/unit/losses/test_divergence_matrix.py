"""Every divergence is the function that it says it is: value and gradient against float64 autograd, written densely.

Kind x tail mode x K x temperature x dtype x tensor-parallel size, with and without chunks of positions and writing in
place; the rows of each case are the hard situations, see ``cases.ROWS``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import Divergence
from tests._support.worker_pool import WorkerPool
from tests.unit.losses.cases import ROWS, SUPPORT_SIZES, VOCABULARY, divergences, make_case, matrix
from tests.unit.losses.runs import Result, cached_case, dense, dense_of_matrix, matrix_shard, own

TOLERANCES = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 1e-2)}
"""Of the value and of the gradient; bfloat16 logits are computed in float32, and their gradient is rounded once."""

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def check(got: Result, want: Result, dtype: torch.dtype, divergence: Divergence, where: str) -> None:
    """Everything that holds for any divergence."""
    where = f"{where}, {divergence}"
    value_tolerance, gradient_tolerance = TOLERANCES[dtype]
    assert_near(got[0], want[0], value_tolerance, f"{where}: value")
    if divergence.kind == "tvd":  # no gradient is defined where it is least
        got, want = (without_row("student equals teacher", *result) for result in (got, want))
    assert_near(got[1], want[1], gradient_tolerance, f"{where}: gradient")
    # They are all functions of softmax(logits), so a constant added to all logits changes nothing.
    sums_T = got[1].double().sum(1) / (1 + got[1].double().abs().sum(1))
    assert_near(sums_T, torch.zeros_like(sums_T), gradient_tolerance, f"{where}: sum of the gradient")
    assert (got[1][:, VOCABULARY:] == 0).all(), f"{where}: the padding has a gradient"


def without_row(name: str, loss: Tensor, grad: Tensor) -> Result:
    other = torch.tensor([row != name for row in ROWS[: len(grad)]])
    return loss, grad * other[:, None]


def assert_near(got: Tensor, want: Tensor, tolerance: float, where: str) -> None:
    wrong = ~((got.double() - want).abs() <= tolerance * (1 + want.abs()))  # nan is wrong, too
    if places := wrong.nonzero().tolist():
        first = tuple(places[0])
        raise AssertionError(
            f"{where}, row {ROWS[first[0]]!r}, {first}: got {got[first]}, expected {want[first]}; {len(places)} in all"
        )


@DTYPES
@pytest.mark.parametrize("k", SUPPORT_SIZES)
def test_value_and_gradient_equal_dense_float64(k: int, dtype: torch.dtype) -> None:
    for _, divergence in (entry for entry in matrix() if entry[0] == k):
        case = cached_case(k, divergence.temperature)
        for chunk_tokens, in_place in ((None, False), (5, True)):
            got = own(case, divergence, dtype, chunk_tokens, in_place)
            check(got, dense_of_matrix(k, divergence), dtype, divergence, f"chunks {chunk_tokens}")


@DTYPES
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_tensor_parallel_size_gives_the_dense_result(pool: WorkerPool, world_size: int, dtype: torch.dtype) -> None:
    ranks = [[torch.from_numpy(part) for part in parts] for parts in pool.run(world_size, matrix_shard, dtype)]
    for number, (k, divergence) in enumerate(matrix()):
        grad = torch.cat([grads[number] for _, grads in ranks], dim=1)
        for losses, _ in ranks:
            assert torch.equal(losses[number], ranks[0][0][number]), "the ranks disagree about the value"
        check((ranks[0][0][number], grad), dense_of_matrix(k, divergence), dtype, divergence, f"K = {k}")


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.7])
def test_temperatures_that_no_float_has_exactly(temperature: float) -> None:
    """Without the rows of huge logits, whose quotients have an error of their own."""
    case = make_case(17, temperature).rows(3)
    for divergence in divergences(temperature):
        check(own(case, divergence), dense(case, divergence), torch.float32, divergence, "one process")


def test_no_positions_have_no_loss_and_an_empty_gradient() -> None:
    case = make_case(17, 1.0).rows(0)
    for divergence in divergences() + divergences(2.0):
        for in_place in (False, True):
            loss, grad = own(case, divergence, in_place=in_place)
            assert loss.shape == (0,) and grad.shape == (0, case.logits_TW.shape[1])


def test_tail_far_below_float32_resolution_of_one_still_has_its_gradient() -> None:
    """The student gives the teacher's tail e^-200: 1 - sum(q) is 0 in any float, the logarithm is not."""
    case = make_case(1, 1.0).rows(1)
    case.logits_TW[:] = -100.0
    case.logits_TW[0, 0] = 100.0
    case.ids_TK[:], case.logps_TK[:] = 0, torch.tensor(0.9).log()
    got = own(case, Divergence())
    check(got, dense(case, Divergence()), torch.float32, Divergence(), "tail of e^-200")
    assert got[0].item() > 15
