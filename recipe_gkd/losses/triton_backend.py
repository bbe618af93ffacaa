"""The operations that touch every logit, as Triton kernels for bfloat16, float16 and float32 logits on a GPU.

The module has the two functions of :mod:`~recipe_gkd.losses.torch_kernels`. Sums are float32. The forward pass reads
the logits once; the backward pass reads and writes them once. The forward pass also needs a bitmask of the support,
which is 1/16 of the size of bfloat16 logits. All positions can therefore be one chunk.

Shape suffixes: R positions of a chunk, W vocabulary columns of this rank, K support ids, H softmaxes, S splits of a
row, X = K + 1 ids of a query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import cdiv

from recipe_gkd.losses import triton_kernels as kernels
from recipe_gkd.losses.logits_query import GradientSpec, SoftmaxSpec

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_COLUMNS = 4096  # 32 bytes of bfloat16 logits for each thread of a program
BLOCK_IDS = 512
NUM_WARPS = 8
LOAD_BYTES = 16  # one load instruction of a thread
# The forward pass splits rows until the GPU has this many programs on each multiprocessor, so that a small number of
# positions also uses the full memory bandwidth.
PROGRAMS_PER_MULTIPROCESSOR = 16
MAX_SPLITS = 64


def tail_sums(logits_RW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor:
    """Return the sums over the ids outside each softmax's support.

    Args:
        logits_RW: This rank's columns of the logits, one of ``LOGIT_DTYPES``.
        softmaxes: Supports and temperatures. Only the first may have a support.
        dtype: Dtype of the sums, float32.

    Returns:
        ``m = max(logit)``, ``sum(exp(x))`` and ``sum(exp(x) * x)`` with ``x = (logit - m) / temperature``, [R, H, 3].
        They are -inf, 0 and 0 for an empty tail.

    Raises:
        TypeError: The logits or the sums have a dtype that the kernels do not support.
        ValueError: The logits are not contiguous along the vocabulary, or a second softmax has a support.
    """
    _check(logits_RW, softmaxes, dtype)
    (n_rows, width), n_softmaxes, device = logits_RW.shape, len(softmaxes), logits_RW.device
    sums_RH3 = torch.empty(n_rows, n_softmaxes, 3, dtype=dtype, device=device)
    if not n_rows:
        return sums_RH3
    n_blocks = cdiv(width, BLOCK_COLUMNS)
    blocks_per_split = cdiv(n_blocks, _max_splits(n_rows, n_blocks, device))
    n_splits = max(1, cdiv(n_blocks, max(blocks_per_split, 1)))
    partial_RSH3 = torch.empty(n_rows, n_splits, n_softmaxes, 3, dtype=dtype, device=device)
    temperatures = _inverse_temperatures(softmaxes)
    with torch.cuda.device_of(logits_RW):
        mask_words = _support_bitmask(softmaxes[0], n_rows, width)
        kernels.sum_tails[n_rows, n_splits](
            partial_RSH3,
            logits_RW,
            mask_words,
            logits_RW.stride(0),
            mask_words.shape[1],
            width,
            min(softmaxes[0].real_columns, width),
            blocks_per_split * BLOCK_COLUMNS,
            *temperatures,
            N_SOFTMAXES=n_softmaxes,
            HAS_SUPPORT=softmaxes[0].columns_TK.shape[1] > 0,
            BLOCK=BLOCK_COLUMNS,
            LANES=LOAD_BYTES // logits_RW.element_size(),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
        kernels.merge_splits[n_rows, n_softmaxes](
            sums_RH3,
            partial_RSH3,
            n_splits,
            *temperatures,
            N_SOFTMAXES=n_softmaxes,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return sums_RH3


def write_gradient(out_RW: Tensor, logits_RW: Tensor, gradient: GradientSpec) -> None:
    """Write the gradient in the logits, rounded once, to the dtype of ``out_RW``.

    Args:
        out_RW: Output. It may be ``logits_RW`` itself.
        logits_RW: This rank's columns of the logits, one of ``LOGIT_DTYPES``.
        gradient: Coefficients at these positions.

    Raises:
        TypeError: A tensor has a dtype that the kernels do not support.
        ValueError: A matrix is not contiguous along the vocabulary, or a second softmax has a support.
    """
    softmaxes = gradient.softmaxes
    _check(logits_RW, softmaxes, gradient.max_TH.dtype)
    _check(out_RW, softmaxes, gradient.max_TH.dtype)
    n_rows, width = logits_RW.shape
    if not n_rows or not width:
        return
    n_ids, real_columns = softmaxes[0].columns_TK.shape[1] + 1, min(softmaxes[0].real_columns, width)
    columns_RK, is_local_RK = _support(softmaxes[0])
    sampled_columns_R1 = gradient.sampled_columns_T1.contiguous()
    # A kernel needs a pointer for the slope, also where it does not read it.
    slope_RH = gradient.grad_tail_TH if gradient.grad_slope_TH is None else gradient.grad_slope_TH
    tails = _float32_rows(gradient.max_TH, gradient.grad_tail_TH, slope_RH)
    values_RX = torch.empty(n_rows, n_ids, dtype=torch.float32, device=logits_RW.device)
    ids = (columns_RK, is_local_RK, sampled_columns_R1)
    # Without fused multiply-add both kernels round the sum of two softmaxes in the same way.
    has_slope = gradient.grad_slope_TH is not None
    options = {"N_SOFTMAXES": len(softmaxes), "HAS_SLOPE": has_slope, "enable_fp_fusion": False}
    with torch.cuda.device_of(logits_RW):
        kernels.compute_id_gradients[n_rows,](  # before the logits may be overwritten
            values_RX,
            logits_RW,
            *ids,
            *_float32_rows(gradient.grad_support_TK, gradient.grad_sampled_T1),
            *tails,
            logits_RW.stride(0),
            n_ids - 1,
            real_columns,
            *_inverse_temperatures(softmaxes),
            BLOCK=BLOCK_IDS,
            **options,
        )
        kernels.write_tails[n_rows, cdiv(width, BLOCK_COLUMNS)](
            out_RW,
            logits_RW,
            *tails,
            out_RW.stride(0),
            logits_RW.stride(0),
            width,
            real_columns,
            *_inverse_temperatures(softmaxes),
            BLOCK=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
            **options,
        )
        kernels.write_id_gradients[n_rows, cdiv(n_ids, BLOCK_IDS)](
            out_RW, values_RX, *ids, out_RW.stride(0), n_ids - 1, BLOCK=BLOCK_IDS, enable_fp_fusion=False
        )


def _max_splits(n_rows: int, n_blocks: int, device: torch.device) -> int:
    is_cuda = device.type == "cuda"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
    return max(1, min(cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, n_rows), n_blocks, MAX_SPLITS))


def _support_bitmask(softmax: SoftmaxSpec, n_rows: int, width: int) -> Tensor:
    """Return the support as bits, int32 [R, ceil(W / 32)]: bit i % 32 of word i // 32 is column i of this rank."""
    columns_RK, is_local_RK = _support(softmax)
    n_support = columns_RK.shape[1]
    n_words = cdiv(width, 32) if n_support else 1
    words = torch.zeros(n_rows, n_words, dtype=torch.int32, device=columns_RK.device)
    if n_support:
        kernels.mark_support[n_rows, cdiv(n_support, BLOCK_IDS)](
            words, columns_RK, is_local_RK, n_words, n_support, BLOCK=BLOCK_IDS, enable_fp_fusion=True
        )
    return words


def _support(softmax: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    return softmax.columns_TK.contiguous(), softmax.is_local_TK.contiguous().view(torch.uint8)


def _float32_rows(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.float32).contiguous() for tensor in tensors]


def _inverse_temperatures(softmaxes: Sequence[SoftmaxSpec]) -> tuple[float, float]:
    return softmaxes[0].inverse_temperature, softmaxes[-1].inverse_temperature


def _check(matrix_RW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> None:
    if matrix_RW.dtype not in LOGIT_DTYPES or dtype != torch.float32:
        raise TypeError(
            f"got {matrix_RW.dtype} logits and sums in {dtype}, expected one of {LOGIT_DTYPES} and sums in "
            "torch.float32; use recipe_gkd.losses.torch_kernels for float64"
        )
    if matrix_RW.stride(1) != 1 and matrix_RW.shape[1] > 1:
        raise ValueError(
            f"got logits with strides {matrix_RW.stride()}, expected stride 1 along the vocabulary; call contiguous()"
        )
    if len(softmaxes) > 2 or any(softmax.columns_TK.shape[1] for softmax in softmaxes[1:]):
        raise ValueError(f"got {len(softmaxes)} softmaxes, expected one, or two of which the second has no support")
