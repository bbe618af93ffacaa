"""The operations that touch every logit, in PyTorch, on a chunk of positions that fits in the cache.

:mod:`~recipe_gkd.losses.triton_backend` has the same two functions for GPUs.

Exponentials are computed as ``exp(x) = exp2(x / ln(2))``, with one factor for the temperature and 1 / ln(2). PyTorch
computes ``exp2`` with its own vector code, and ``exp`` with MKL, which takes three times as long on some CPUs.

Shape suffixes: R positions of a chunk, W vocabulary columns of this rank, K support ids, H softmaxes, X columns of
scratch memory: columns of W that are not padding, and further columns up to a multiple of ``SCRATCH_COLUMNS``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from recipe_gkd.losses.logits_query import GradientSpec, SoftmaxSpec

LN_2 = math.log(2)

# Finite stand-in for -inf in exponents of 2, because the product of -inf and exp2(-inf) is nan. 2**-115 is negligible
# beside 1 in float64.
MIN_EXPONENT = -115.0

# At least the float32 numbers of one vector instruction. PyTorch computes the end of an array, if it does not fill a
# vector, with other code, which rounds exp2 differently. Results would depend on the number of positions of a chunk.
SCRATCH_COLUMNS = 64

MAX_SCRATCH_ELEMENTS = 1 << 22

_scratch_buffers = threading.local()


def tail_sums(logits_RW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor:
    """Return the sums over the ids outside each softmax's support.

    The maximum is subtracted from the logits before the division by the temperature. Differences of logits are exact
    for logits of any size; differences of ``logit / temperature`` are not.

    Args:
        logits_RW: This rank's columns of the logits, any float dtype.
        softmaxes: Supports and temperatures.
        dtype: Dtype of the sums, float32 or float64.

    Returns:
        ``m = max(logit)``, ``sum(exp(x))`` and ``sum(exp(x) * x)`` with ``x = (logit - m) / temperature``, [R, H, 3].
        They are -inf, 0 and 0 for an empty tail.
    """
    return torch.stack([_tail_sums(logits_RW, softmax, dtype) for softmax in softmaxes], dim=1)


def _tail_sums(logits_RW: Tensor, softmax: SoftmaxSpec, dtype: torch.dtype) -> Tensor:
    logits_RW = logits_RW[:, : softmax.real_columns]
    if not logits_RW.shape[1]:
        return logits_RW.new_tensor([float("-inf"), 0, 0], dtype=dtype).expand(len(logits_RW), 3)
    x_RX = _scratch("x", logits_RW, dtype)
    x_RX[:, : logits_RW.shape[1]].copy_(logits_RW)
    _mask_support(x_RX, softmax)
    m_R = x_RX.amax(1)
    has_tail_R = m_R != float("-inf")
    x_RX.sub_(m_R[:, None]).mul_(softmax.inverse_temperature / LN_2)
    exp_RX = torch.exp2(x_RX, out=_scratch("exp", logits_RW, dtype))
    sum_R = exp_RX.sum(1)
    # nansum leaves out 0 * -inf: at the support, in the further columns, and at logits of -inf. A nan logit makes all
    # exponents of its row nan: the last term restores it.
    weighted_R = exp_RX.mul_(x_RX).nansum(1) * LN_2 + 0 * sum_R
    return torch.stack([m_R, sum_R.where(has_tail_R, 0), weighted_R.where(has_tail_R, 0)], dim=1)


def write_gradient(out_RW: Tensor, logits_RW: Tensor, gradient: GradientSpec) -> None:
    """Write the gradient in the logits, rounded once, to the dtype of ``out_RW``.

    Args:
        out_RW: Output. It may be ``logits_RW`` itself.
        logits_RW: This rank's columns of the logits.
        gradient: Coefficients at these positions.
    """
    real_columns, dtype = gradient.softmaxes[0].real_columns, gradient.max_TH.dtype
    out_RW[:, real_columns:] = 0
    out_RW, logits_RW = out_RW[:, :real_columns], logits_RW[:, :real_columns]
    if not out_RW.shape[1]:
        return
    has_one_term = len(gradient.softmaxes) == 1
    is_direct = has_one_term and out_RW.dtype == dtype
    # The only term may be written over its own exponents, in memory that is already in the cache.
    grad_RW = out_RW if is_direct else _scratch("x" if has_one_term else "sum", logits_RW, dtype)[:, :real_columns]
    for number in range(len(gradient.softmaxes)):
        _add_tail_gradient(grad_RW, logits_RW, gradient, number)
    grad_RW.scatter_add_(1, gradient.softmaxes[0].columns_TK, gradient.grad_support_TK)
    grad_RW.scatter_add_(1, gradient.sampled_columns_T1, gradient.grad_sampled_T1)
    if not is_direct:
        out_RW.copy_(grad_RW)


def _add_tail_gradient(grad_RW: Tensor, logits_RW: Tensor, gradient: GradientSpec, number: int) -> None:
    """Add the gradient's term of softmax ``number``; the first one is written over the memory."""
    softmax, max_R1, dtype = gradient.softmaxes[number], gradient.max_TH[:, number, None], gradient.max_TH.dtype
    grad_tail_R1 = gradient.grad_tail_TH[:, number, None] * softmax.inverse_temperature
    width = logits_RW.shape[1]
    x_RX = _scratch("x", logits_RW, dtype)
    if logits_RW.dtype == dtype:
        torch.sub(logits_RW, max_R1, out=x_RX[:, :width])
    else:  # a subtraction of two dtypes would allocate a converted copy
        x_RX[:, :width].copy_(logits_RW).sub_(max_R1)
    _mask_support(x_RX, softmax)
    x_RX.mul_(softmax.inverse_temperature / LN_2)
    if gradient.grad_slope_TH is None:
        exp_RX, factor = x_RX.exp2_(), grad_tail_R1
    else:
        x_RX.clamp_(min=MIN_EXPONENT)
        exp_RX = torch.exp2(x_RX, out=_scratch("exp", logits_RW, dtype))
        grad_slope_R1 = gradient.grad_slope_TH[:, number, None] * (softmax.inverse_temperature * LN_2)
        factor = x_RX.mul_(grad_slope_R1).add_(grad_tail_R1)[:, :width]
    exp_RW = exp_RX[:, :width]
    if number:
        grad_RW += exp_RW.mul_(factor)
    else:
        torch.mul(exp_RW, factor, out=grad_RW)


def _mask_support(x_RX: Tensor, softmax: SoftmaxSpec) -> None:
    """Write -inf at this rank's support ids."""
    if softmax.columns_TK.shape[1]:
        # Entries of other ranks have column 0; adding 0 there leaves that logit unchanged.
        mask_RK = torch.zeros_like(softmax.columns_TK, dtype=x_RX.dtype)
        x_RX.scatter_add_(1, softmax.columns_TK, mask_RK.masked_fill_(softmax.is_local_TK, float("-inf")))


def _scratch(name: str, logits_RW: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for these logits that is valid until the next call with this name in this thread.

    On a CPU the memory is reused: page faults of fresh memory cost more than the operations on it.

    Returns:
        Memory [R, X]. The first W columns are uninitialized, the others are -inf.
    """
    n_rows, width = logits_RW.shape
    columns = -(-width // SCRATCH_COLUMNS) * SCRATCH_COLUMNS
    x_RX = _memory(name, n_rows * columns, dtype, logits_RW.device).view(n_rows, columns)
    if width < columns:
        x_RX[:, width:] = float("-inf")
    return x_RX


def _memory(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or size > MAX_SCRATCH_ELEMENTS:
        return torch.empty(size, dtype=dtype, device=device)
    buffer = getattr(_scratch_buffers, name, None)
    if buffer is None or buffer.dtype != dtype or buffer.numel() < size:
        buffer = torch.empty(size, dtype=dtype)
        setattr(_scratch_buffers, name, buffer)
    return buffer[:size]
