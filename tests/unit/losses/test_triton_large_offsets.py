"""The Triton kernels of the loss on rows whose offsets exceed 2^31, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses.kernel_backend import select_backend
from tests._support.triton_interpreter import Run
from tests._support.virtual_memory import little_memory_used, run_or_skip, sparse_tensor
from tests.unit.losses.kernel_cases import Case, check_gradient, check_sums, dense_gradient, dense_sums, make_chunk

pytest.importorskip("triton", reason="needs triton")

STRIDE = 2**30 + 16
"""Elements between two rows. The third row starts after 2^31 elements."""
BLOCK_IDS = 512


def check_logits(case: Case) -> None:
    """Check sums and gradients, out of place and in place, of logits with large offsets."""
    chunk = make_chunk(case)
    backend = select_backend(chunk.logits_RW, "triton")
    with little_memory_used():
        logits_RW = spread(chunk.logits_RW)
        chunk = replace(chunk, logits_RW=logits_RW)
        check_sums(backend, chunk)
        grad_RW, expected_RW = check_gradient(backend, chunk), dense_gradient(chunk)
        out_RW = sparse_tensor(logits_RW.shape, (STRIDE, 1), torch.float32)
        backend.write_gradient(out_RW, logits_RW, chunk.gradient)
        assert torch.equal(out_RW, grad_RW)
        backend.write_gradient(logits_RW, logits_RW, chunk.gradient)
        torch.testing.assert_close(logits_RW.double(), expected_RW, rtol=2**-7, atol=1e-6)


def check_support() -> None:
    """Check the kernels of the support for as many ids as no launch of a test can visit.

    The kernels are called directly: the wrapper makes the ids contiguous, and its grid visits all of them.
    """
    from recipe_gkd.losses import triton_kernels as kernels

    chunk = make_chunk(Case(width=5000, real_columns=4990, k=BLOCK_IDS))
    rows, logits_RW, softmax = range(len(chunk.logits_RW)), chunk.logits_RW, chunk.softmaxes[0]
    with little_memory_used():
        columns_RK, is_local_RK = spread(softmax.columns_TK), spread(softmax.is_local_TK.view(torch.uint8))
        words_RX = sparse_tensor((len(rows), 157), (STRIDE, 1), torch.int32)
        ids = columns_RK, is_local_RK
        kernels.mark_support[len(rows), 1](words_RX, *ids, STRIDE, STRIDE, BLOCK=BLOCK_IDS)
        is_marked_RW = words_RX[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1 == 1
        for row in rows:
            expected = softmax.columns_TK[row][softmax.is_local_TK[row]].sort().values
            assert is_marked_RW[row].flatten().nonzero()[:, 0].tolist() == expected.tolist()

        sums_R3 = torch.empty(len(rows), 3)
        kernels.sum_tails[len(rows), 1](
            sums_R3, logits_RW, words_RX, logits_RW.stride(0), STRIDE, 5000, 4990, 8192, 1.0, 1.0,
            N_SOFTMAXES=1, HAS_SUPPORT=True, BLOCK=4096, LANES=4,
        )  # fmt: skip
        torch.testing.assert_close(sums_R3.double(), dense_sums(logits_RW, softmax), rtol=5e-6, atol=1e-6)

        values_RK = sparse_tensor(columns_RK.shape, (STRIDE + 1, 1), torch.float32)
        values_RK.copy_(chunk.gradient.grad_support_TK)
        out_RW = torch.zeros(logits_RW.shape)
        sampled_R1 = chunk.gradient.sampled_columns_T1
        kernels.write_id_gradients[len(rows), 1](
            out_RW, values_RK, *ids, sampled_R1, out_RW.stride(0), STRIDE, BLOCK=BLOCK_IDS
        )
        expected_RW = torch.zeros(logits_RW.shape)
        expected_RW.scatter_add_(1, softmax.columns_TK, chunk.gradient.grad_support_TK)
        assert torch.equal(out_RW, expected_RW)


def check_splits() -> None:
    """Check the merge of sums far apart. A launch has no such sums, because its rows have at most 64 splits."""
    from recipe_gkd.losses import triton_kernels as kernels

    n_splits, max_splits = 2**29, 64
    with little_memory_used():
        partials_RS3 = sparse_tensor((3, max_splits, 3), (3 * n_splits, 3, 1), torch.float32)
        for row, partials_S3 in enumerate(partials_RS3):
            partials_S3.copy_(torch.tensor([10.0 * row, 1.0, -0.5]))
        sums_R3 = torch.empty(3, 3)
        kernels.merge_splits[3, 1](sums_R3, partials_RS3, n_splits, 0.5, 0.5, N_SOFTMAXES=1, MAX_SPLITS=max_splits)
        assert sums_R3.tolist() == [[10.0 * row, max_splits, -0.25 * max_splits] for row in range(3)]


def spread(matrix_RX: Tensor) -> Tensor:
    """Return a copy with ``STRIDE`` elements between two rows."""
    return sparse_tensor(matrix_RX.shape, (STRIDE, 1), matrix_RX.dtype).copy_(matrix_RX)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_rows_beyond_2_31_logits_equal_dense_float64(interpreted: Run, temperature: float) -> None:
    case = Case(width=5000, real_columns=4990, dtype=torch.bfloat16, temperature=temperature, has_slope=True)
    run_or_skip(interpreted, check_logits, case)


def test_rows_beyond_2_31_support_ids_equal_dense_float64(interpreted: Run) -> None:
    run_or_skip(interpreted, check_support)


def test_splits_beyond_2_31_sums_are_merged(interpreted: Run) -> None:
    run_or_skip(interpreted, check_splits)
