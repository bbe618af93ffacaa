"""The operations that touch every logit, in PyTorch, on a chunk of positions that fits in the cache.

:mod:`~recipe_gkd.losses.triton_backend` has the same two functions for GPUs.

Shape suffixes: C positions of a chunk, W vocabulary columns of this rank, K support ids, H softmaxes.
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


def tail_sums(logits_CW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor:
    """Return the sums over the ids outside each softmax's support.

    The maximum is subtracted from the logits before the division by the temperature. Differences of logits are exact
    for logits of any size; differences of ``logit / temperature`` are not.

    Args:
        logits_CW: This rank's columns of the logits, any float dtype.
        softmaxes: Supports and temperatures.
        dtype: Dtype of the sums, float32 or float64.

    Returns:
        ``m = max(logit)``, ``sum(exp(x))`` and ``sum(exp(x) * x)`` with ``x = (logit - m) / temperature``, [C, H, 3].
        They are -inf, 0 and 0 for an empty tail.
    """
    return torch.stack([_tail_sums(logits_CW, softmax, dtype) for softmax in softmaxes], dim=1)


def _tail_sums(logits_CW: Tensor, softmax: SoftmaxSpec, dtype: torch.dtype) -> Tensor:
    # torch.softmax is one kernel, and faster than exp followed by sum: sum(exp(x)) is 1 / (the largest share).
    x_CW = _mask_support(logits_CW, softmax, dtype)
    if not x_CW.shape[1]:
        return x_CW.new_tensor([float("-inf"), 0, 0]).expand(len(x_CW), 3)
    m_C = x_CW.amax(1)
    has_tail_C = m_C != float("-inf")
    _shift_and_scale(x_CW, m_C, softmax)
    share_CW = torch.softmax(x_CW, 1, out=_scratch("share", x_CW.shape, dtype, x_CW.device))
    sum_C = share_CW.amax(1).reciprocal()
    x_CW.clamp_(min=MIN_EXPONENT)
    weighted_C = x_CW.mul_(share_CW).sum(1) * sum_C
    return torch.stack([m_C, sum_C.where(has_tail_C, 0), weighted_C.where(has_tail_C, 0)], dim=1)


def write_gradient(out_CW: Tensor, logits_CW: Tensor, gradient: GradientSpec) -> None:
    """Write the gradient in the logits, rounded once, to the dtype of ``out_CW``.

    Args:
        out_CW: Output. It may be ``logits_CW`` itself.
        logits_CW: This rank's columns of the logits.
        gradient: Coefficients at these positions.
    """
    grad_CW = _tail_gradient(logits_CW, gradient, 0)
    if len(gradient.softmaxes) > 1:
        grad_CW = grad_CW.clone()
        for number in range(1, len(gradient.softmaxes)):
            grad_CW += _tail_gradient(logits_CW, gradient, number)
    grad_CW.scatter_add_(1, gradient.softmaxes[0].columns_TK, gradient.grad_support_TK)
    grad_CW.scatter_add_(1, gradient.sampled_columns_T1, gradient.grad_sampled_T1)
    out_CW.copy_(grad_CW)


def _tail_gradient(logits_CW: Tensor, gradient: GradientSpec, number: int) -> Tensor:
    """Return the gradient's term of softmax ``number`` in scratch memory."""
    softmax, max_C = gradient.softmaxes[number], gradient.max_TH[:, number]
    grad_tail_C = gradient.grad_tail_TH[:, number] * softmax.inverse_temperature
    x_CW = _mask_support(logits_CW, softmax, max_C.dtype)
    _shift_and_scale(x_CW, max_C, softmax)
    x_CW.clamp_(min=MIN_EXPONENT)
    if gradient.grad_slope_TH is None:
        grad_CW = x_CW.exp_().mul_(grad_tail_C[:, None])
    else:
        grad_slope_C = gradient.grad_slope_TH[:, number] * softmax.inverse_temperature
        exp_CW = torch.exp(x_CW, out=_scratch("share", x_CW.shape, x_CW.dtype, x_CW.device))
        grad_CW = x_CW.mul_(grad_slope_C[:, None]).add_(grad_tail_C[:, None]).mul_(exp_CW)
    grad_CW[:, softmax.real_columns :] = 0
    return grad_CW


def _shift_and_scale(x_CW: Tensor, max_C: Tensor, softmax: SoftmaxSpec) -> None:
    x_CW.sub_(max_C[:, None])
    if softmax.inverse_temperature != 1:
        x_CW.mul_(softmax.inverse_temperature)


def _mask_support(logits_CW: Tensor, softmax: SoftmaxSpec, dtype: torch.dtype) -> Tensor:
    """Return the logits in scratch memory, with -inf at this rank's support ids and in the padding."""
    x_CW = _scratch("x", logits_CW.shape, dtype, logits_CW.device).copy_(logits_CW)
    x_CW[:, softmax.real_columns :] = float("-inf")
    if softmax.columns_TK.shape[1]:
        # Entries of other ranks have column 0; adding 0 there leaves that logit unchanged.
        mask_CK = torch.zeros_like(softmax.columns_TK, dtype=dtype).masked_fill_(softmax.is_local_TK, float("-inf"))
        x_CW.scatter_add_(1, softmax.columns_TK, mask_CK)
    return x_CW


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
