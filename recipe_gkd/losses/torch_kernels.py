"""The operations that touch every logit, in PyTorch, on a chunk of positions that fits in the cache.

:mod:`~recipe_gkd.losses.triton_backend` has the same two functions for GPUs.

Shape suffixes: R positions of a chunk, W vocabulary columns of this rank, K support ids, H softmaxes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from recipe_gkd.losses.logits_query import GradientSpec, SoftmaxSpec

# Finite stand-in for -inf in exponents. exp(-80) is negligible beside 1 in float64 and still a normal float32 number;
# subnormal numbers are ten times as slow.
MIN_EXPONENT = -80.0

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
    # torch.softmax is one kernel, and faster than exp followed by sum: sum(exp(x)) is 1 / (the largest share).
    x_RW = _mask_support(logits_RW, softmax, dtype)
    if not x_RW.shape[1]:
        return x_RW.new_tensor([float("-inf"), 0, 0]).expand(len(x_RW), 3)
    m_R = x_RW.amax(1)
    has_tail_R = m_R != float("-inf")
    _shift_and_scale(x_RW, m_R, softmax)
    share_RW = torch.softmax(x_RW, 1, out=_scratch("share", x_RW.shape, dtype, x_RW.device))
    sum_R = share_RW.amax(1).reciprocal()
    x_RW.clamp_(min=MIN_EXPONENT)
    weighted_R = x_RW.mul_(share_RW).sum(1) * sum_R
    return torch.stack([m_R, sum_R.where(has_tail_R, 0), weighted_R.where(has_tail_R, 0)], dim=1)


def write_gradient(out_RW: Tensor, logits_RW: Tensor, gradient: GradientSpec) -> None:
    """Write the gradient in the logits, rounded once, to the dtype of ``out_RW``.

    Args:
        out_RW: Output. It may be ``logits_RW`` itself.
        logits_RW: This rank's columns of the logits.
        gradient: Coefficients at these positions.
    """
    grad_RW = _tail_gradient(logits_RW, gradient, 0)
    if len(gradient.softmaxes) > 1:
        grad_RW = grad_RW.clone()
        for number in range(1, len(gradient.softmaxes)):
            grad_RW += _tail_gradient(logits_RW, gradient, number)
    grad_RW.scatter_add_(1, gradient.softmaxes[0].columns_TK, gradient.grad_support_TK)
    grad_RW.scatter_add_(1, gradient.sampled_columns_T1, gradient.grad_sampled_T1)
    out_RW.copy_(grad_RW)


def _tail_gradient(logits_RW: Tensor, gradient: GradientSpec, number: int) -> Tensor:
    """Return the gradient's term of softmax ``number`` in scratch memory."""
    softmax, max_R = gradient.softmaxes[number], gradient.max_TH[:, number]
    grad_tail_R = gradient.grad_tail_TH[:, number] * softmax.inverse_temperature
    x_RW = _mask_support(logits_RW, softmax, max_R.dtype)
    _shift_and_scale(x_RW, max_R, softmax)
    x_RW.clamp_(min=MIN_EXPONENT)
    if gradient.grad_slope_TH is None:
        grad_RW = x_RW.exp_().mul_(grad_tail_R[:, None])
    else:
        grad_slope_R = gradient.grad_slope_TH[:, number] * softmax.inverse_temperature
        exp_RW = torch.exp(x_RW, out=_scratch("share", x_RW.shape, x_RW.dtype, x_RW.device))
        grad_RW = x_RW.mul_(grad_slope_R[:, None]).add_(grad_tail_R[:, None]).mul_(exp_RW)
    grad_RW[:, softmax.real_columns :] = 0
    return grad_RW


def _shift_and_scale(x_RW: Tensor, max_R: Tensor, softmax: SoftmaxSpec) -> None:
    x_RW.sub_(max_R[:, None])
    if softmax.inverse_temperature != 1:
        x_RW.mul_(softmax.inverse_temperature)


def _mask_support(logits_RW: Tensor, softmax: SoftmaxSpec, dtype: torch.dtype) -> Tensor:
    """Return the logits in scratch memory, with -inf at this rank's support ids and in the padding."""
    x_RW = _scratch("x", logits_RW.shape, dtype, logits_RW.device).copy_(logits_RW)
    x_RW[:, softmax.real_columns :] = float("-inf")
    if softmax.columns_TK.shape[1]:
        # Entries of other ranks have column 0; adding 0 there leaves that logit unchanged.
        mask_RK = torch.zeros_like(softmax.columns_TK, dtype=dtype).masked_fill_(softmax.is_local_TK, float("-inf"))
        x_RW.scatter_add_(1, softmax.columns_TK, mask_RK)
    return x_RW


def _scratch(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory that is valid until the next call with this name in this thread.

    On a CPU the memory is reused: page faults of fresh memory cost more than the operations on it.
    """
    if device.type != "cpu" or shape.numel() > MAX_SCRATCH_ELEMENTS:
        return torch.empty(shape, dtype=dtype, device=device)
    buffer = getattr(_scratch_buffers, name, None)
    if buffer is None or buffer.dtype != dtype or buffer.numel() < shape.numel():
        buffer = torch.empty(shape.numel(), dtype=dtype)
        setattr(_scratch_buffers, name, buffer)
    return buffer[: shape.numel()].view(shape)
