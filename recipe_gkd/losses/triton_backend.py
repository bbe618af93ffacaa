"""The arithmetic that touches every logit, as Triton kernels: the same two functions as
:mod:`~recipe_gkd.losses.torch_kernels`, for bfloat16, float16 and float32 on a GPU, with float32 inside.

The forward pass reads the logits once, the backward pass reads and writes them once. Beside them there are numbers by
row and, in the forward pass, a bitmask of the support, which is 1/16 of the size of bfloat16 logits: all positions can
be one chunk.

Axis names: C positions of a chunk, W columns of this rank, K support ids, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import cdiv

from recipe_gkd.losses import triton_kernels as kernels
from recipe_gkd.losses.logits_query import Backward, SoftmaxSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 4096
"""In one step of a program: 32 bytes of bfloat16 logits for each of its threads."""
ENTRIES = 512
"""Support ids in one step of a program."""
WARPS = 8
PROGRAMS_PER_PROCESSOR = 16
"""Of a GPU. The forward pass divides rows until it has as many, so that a few positions keep the memory busy, too."""
MOST_SPLITS = 64
"""Of one row."""
LANES_BYTES = 16
"""What a thread reads at once."""


def tail_sums(logits_CW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor:
    """[C, H, 3] over the ids off each head's support: m = max logit, sum exp(x), and sum exp(x) x, with
    x = (logit - m) / temperature. They are -inf, 0, 0 where there are no such ids.
    """
    _check(logits_CW, softmaxes, dtype)
    (rows, width), n_heads, device = logits_CW.shape, len(softmaxes), logits_CW.device
    sums_CH3 = torch.empty(rows, n_heads, 3, dtype=dtype, device=device)
    if not rows:
        return sums_CH3
    blocks = cdiv(width, COLUMNS)
    blocks_per_split = cdiv(blocks, _splits(rows, blocks, device))
    splits = max(1, cdiv(blocks, max(blocks_per_split, 1)))
    parts_CSH3 = torch.empty(rows, splits, n_heads, 3, dtype=dtype, device=device)
    temperatures = _inverse_temperatures(softmaxes)
    with torch.cuda.device_of(logits_CW):
        words_CW = _support_words(softmaxes[0], rows, width)
        kernels.sum_tails[rows, splits](
            parts_CSH3,
            logits_CW,
            words_CW,
            logits_CW.stride(0),
            words_CW.shape[1],
            width,
            min(softmaxes[0].real_columns, width),
            blocks_per_split * COLUMNS,
            *temperatures,
            HEADS=n_heads,
            SUPPORT=softmaxes[0].columns_TK.shape[1] > 0,
            BLOCK=COLUMNS,
            LANES=LANES_BYTES // logits_CW.element_size(),
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
        kernels.merge_splits[rows, n_heads](
            sums_CH3,
            parts_CSH3,
            splits,
            *temperatures,
            HEADS=n_heads,
            SPLITS=MOST_SPLITS,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return sums_CH3


def write_gradient(out_CW: Tensor, logits_CW: Tensor, wanted: Backward) -> None:
    """Into ``out_CW``, which may be ``logits_CW`` itself; rounded once, to its dtype."""
    softmaxes, top_CH, grad_tail_CH = wanted.softmaxes, wanted.top_TH, wanted.grad_tail_TH
    _check(logits_CW, softmaxes, top_CH.dtype)
    _check(out_CW, softmaxes, top_CH.dtype)
    (rows, width), n_heads, device = logits_CW.shape, len(softmaxes), logits_CW.device
    if not rows or not width:
        return
    temperatures = _inverse_temperatures(softmaxes)
    n_support, real_columns = softmaxes[0].columns_TK.shape[1], min(softmaxes[0].real_columns, width)
    columns_CK, own_CK = _entries(softmaxes[0])
    picked_columns_C1, (top_CH, grad_tail_CH) = wanted.picked_columns_T1.contiguous(), _rows(top_CH, grad_tail_CH)
    values_CX = torch.empty(rows, n_support + 1, dtype=torch.float32, device=device)
    # Without fused multiply-add, so that both kernels round the sum of two heads alike.
    options = {"enable_fp_fusion": False}
    with torch.cuda.device_of(logits_CW):
        kernels.find_special[rows,](
            values_CX,
            logits_CW,
            columns_CK,
            own_CK,
            *_rows(wanted.grad_support_TK),
            picked_columns_C1,
            *_rows(wanted.grad_picked_T1),
            top_CH,
            grad_tail_CH,
            logits_CW.stride(0),
            n_support,
            real_columns,
            *temperatures,
            HEADS=n_heads,
            BLOCK=ENTRIES,
            **options,
        )
        kernels.write_tails[rows, cdiv(width, COLUMNS)](
            out_CW,
            logits_CW,
            top_CH,
            grad_tail_CH,
            out_CW.stride(0),
            logits_CW.stride(0),
            width,
            real_columns,
            *temperatures,
            HEADS=n_heads,
            BLOCK=COLUMNS,
            num_warps=WARPS,
            **options,
        )
        kernels.write_special[rows, cdiv(n_support + 1, ENTRIES)](
            out_CW,
            values_CX,
            columns_CK,
            own_CK,
            picked_columns_C1,
            out_CW.stride(0),
            n_support,
            BLOCK=ENTRIES,
            **options,
        )


def _splits(rows: int, blocks: int, device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(cdiv(PROGRAMS_PER_PROCESSOR * processors, rows), blocks, MOST_SPLITS))


def _support_words(head: SoftmaxSpec, rows: int, width: int) -> Tensor:
    """[C, ceil(W / 32)] int32: bit i % 32 of word i // 32 says that id i of this rank is in the support."""
    columns_CK, own_CK = _entries(head)
    n_support = columns_CK.shape[1]
    words_CW = torch.zeros(rows, cdiv(width, 32) if n_support else 1, dtype=torch.int32, device=columns_CK.device)
    if n_support:
        kernels.mark_support[rows, cdiv(n_support, ENTRIES)](
            words_CW, columns_CK, own_CK, words_CW.shape[1], n_support, BLOCK=ENTRIES, enable_fp_fusion=True
        )
    return words_CW


def _entries(head: SoftmaxSpec) -> tuple[Tensor, Tensor]:
    return head.columns_TK.contiguous(), head.own_TK.contiguous().view(torch.uint8)


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.float32).contiguous() for tensor in tensors]


def _inverse_temperatures(softmaxes: Sequence[SoftmaxSpec]) -> tuple[float, float]:
    return softmaxes[0].inverse_temperature, softmaxes[-1].inverse_temperature


def _check(matrix_CW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> None:
    if matrix_CW.dtype not in DTYPES or dtype != torch.float32:
        raise TypeError(
            f"got {matrix_CW.dtype} logits and sums in {dtype}, expected one of {DTYPES} and sums in torch.float32: "
            "recipe_gkd.losses.torch_kernels computes in float64"
        )
    if matrix_CW.stride(1) != 1 and matrix_CW.shape[1] > 1:
        raise ValueError(
            f"got logits of strides {matrix_CW.stride()}, expected 1 along the vocabulary: call contiguous()"
        )
    if len(softmaxes) > 2 or any(head.columns_TK.shape[1] for head in softmaxes[1:]):
        raise ValueError(f"got {len(softmaxes)} heads, expected the buckets, and at most a second head without support")
