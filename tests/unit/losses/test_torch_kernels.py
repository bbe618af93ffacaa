"""Properties of the PyTorch kernels that the comparison with dense float64 does not show."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.losses import torch_kernels
from tests.unit.losses.kernel_cases import Case, make_chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("has_slope", [False, True])
def test_kernels_any_number_of_rows_gives_equal_bits(has_slope: bool, temperature: float, dtype: torch.dtype) -> None:
    """The last columns of an array that does not fill a vector are computed by other code of PyTorch."""
    case = Case(rows=7, width=203, real_columns=197, temperature=temperature, has_slope=has_slope, dtype=dtype)
    chunk = make_chunk(case)
    results = []
    for step in (7, 3, 2, 1):
        parts = [slice(start, start + step) for start in range(0, 7, step)]
        out_RW = torch.empty_like(chunk.logits_RW)
        sums = []
        for part in parts:
            softmaxes = [softmax.rows(part) for softmax in chunk.softmaxes]
            sums.append(torch_kernels.tail_sums(chunk.logits_RW[part], softmaxes, torch.float32))
            torch_kernels.write_gradient(out_RW[part], chunk.logits_RW[part], chunk.gradient.rows(part))
        results.append((torch.cat(sums), out_RW))
    for sums_RH3, out_RW in results[1:]:
        assert torch.equal(sums_RH3, results[0][0]) and torch.equal(out_RW, results[0][1])


def test_tail_sums_nan_logit_gives_nan_sums_of_its_row() -> None:
    chunk = make_chunk(Case(k=0, temperature=2.0))
    chunk.logits_RW[1, 100] = float("nan")
    sums_RH3 = torch_kernels.tail_sums(chunk.logits_RW, chunk.softmaxes, torch.float32)
    assert sums_RH3[0].isfinite().all() and sums_RH3[2].isfinite().all() and sums_RH3[1].isnan().all()


def test_write_gradient_huge_support_logit_gives_finite_gradient() -> None:
    """The exponential of a support logit overflows; it must not reach the gradient."""
    chunk = make_chunk(Case(kind="all mass on the support"))
    chunk.logits_RW[chunk.logits_RW > 500] = 3e38
    out_RW = torch.empty_like(chunk.logits_RW)
    torch_kernels.write_gradient(out_RW, chunk.logits_RW, chunk.gradient)
    assert out_RW.isfinite().all()


def test_scratch_memory_is_reused_between_chunks() -> None:
    logits_RW = torch.zeros(3, 100)
    first, second = (torch_kernels._scratch("test", logits_RW[:n_rows], torch.float32) for n_rows in (3, 2))
    assert first.data_ptr() == second.data_ptr()
    assert second.shape == (2, 128) and (second[:, 100:] == float("-inf")).all()
