"""The arithmetic that touches every logit, on a chunk of positions that fits in cache: plain PyTorch.

:mod:`~recipe_gkd.losses.triton_backend` has the same two functions for GPUs.
Axis names: C positions of a chunk, W columns of this rank, K support ids, H heads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from recipe_gkd.losses.logits_query import Backward, SoftmaxSpec

FAR_BELOW = -80.0
"""A finite stand-in for all that lies further below the maximum, -inf too: exp of it is nothing beside 1 in float64,
but not yet one of the denormal numbers, which are ten times as slow."""


def tail_sums(logits_CW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor:
    """Return, over the ids off each head's support, m = max logit, sum exp(x) and sum exp(x) x: [C, H, 3].

    x = (logit - m) / temperature. The three are -inf, 0, 0 where there are no such ids. Differences of logits lose no
    digit, however large the logits are; those of logit / temperature would.
    """
    return torch.stack([_tail_sums(logits_CW, head, dtype) for head in softmaxes], dim=1)


def _tail_sums(logits_CW: Tensor, head: SoftmaxSpec, dtype: torch.dtype) -> Tensor:
    """Compute them by PyTorch's softmax: its one kernel is faster than exp and sum. sum exp(x) = 1 / (its largest)."""
    x_CW = _off_support(logits_CW, head, dtype)
    if not x_CW.shape[1]:
        return x_CW.new_tensor([float("-inf"), 0, 0]).expand(len(x_CW), 3)
    m_C = x_CW.amax(1)
    exists_C = m_C != float("-inf")
    _shift_and_divide(x_CW, m_C, head)
    share_CW = torch.softmax(x_CW, 1, out=_scratch("share", x_CW.shape, dtype, x_CW.device))
    sum_C = share_CW.amax(1).reciprocal()
    x_CW.clamp_(min=FAR_BELOW)
    weighted_C = x_CW.mul_(share_CW).sum(1) * sum_C
    return torch.stack([m_C, sum_C.where(exists_C, 0), weighted_C.where(exists_C, 0)], dim=1)


def write_gradient(out_CW: Tensor, logits_CW: Tensor, wanted: Backward) -> None:
    """Into ``out_CW``, which may be ``logits_CW`` itself; rounded once, to its dtype."""
    softmaxes, top_CH, grad_tail_CH = wanted.softmaxes, wanted.top_TH, wanted.grad_tail_TH
    grad_CW = _tail_gradient(logits_CW, softmaxes[0], top_CH[:, 0], grad_tail_CH[:, 0])
    if len(softmaxes) > 1:
        grad_CW = grad_CW.clone()
        for number in range(1, len(softmaxes)):
            grad_CW += _tail_gradient(logits_CW, softmaxes[number], top_CH[:, number], grad_tail_CH[:, number])
    grad_CW.scatter_add_(1, softmaxes[0].columns_TK, wanted.grad_support_TK)
    grad_CW.scatter_add_(1, wanted.picked_columns_T1, wanted.grad_picked_T1)
    out_CW.copy_(grad_CW)


def _tail_gradient(logits_CW: Tensor, head: SoftmaxSpec, top_C: Tensor, grad_tail_C: Tensor) -> Tensor:
    x_CW = _off_support(logits_CW, head, top_C.dtype)
    _shift_and_divide(x_CW, top_C, head)
    x_CW.clamp_(min=FAR_BELOW).exp_()
    x_CW[:, head.real_columns :] = 0
    return x_CW.mul_((grad_tail_C * head.inverse_temperature)[:, None])


def _shift_and_divide(x_CW: Tensor, top_C: Tensor, head: SoftmaxSpec) -> None:
    x_CW.sub_(top_C[:, None])
    if head.inverse_temperature != 1:
        x_CW.mul_(head.inverse_temperature)


def _off_support(logits_CW: Tensor, head: SoftmaxSpec, dtype: torch.dtype) -> Tensor:
    """Return the logits in ``dtype``, in scratch memory, with -inf on this rank's support ids and in the padding."""
    x_CW = _scratch("x", logits_CW.shape, dtype, logits_CW.device).copy_(logits_CW)
    x_CW[:, head.real_columns :] = float("-inf")
    if head.columns_TK.shape[1]:  # entries of other ranks point at column 0, which they must leave as it is
        blank_CK = torch.zeros_like(head.columns_TK, dtype=dtype).masked_fill_(head.own_TK, float("-inf"))
        x_CW.scatter_add_(1, head.columns_TK, blank_CK)
    return x_CW


MOST_KEPT = 1 << 22
"""Elements."""
_kept = threading.local()


def _scratch(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory, valid until the next call with this name in this thread.

    Kept on a CPU, where the pages of fresh memory cost more than the arithmetic on them.
    """
    if device.type != "cpu" or shape.numel() > MOST_KEPT:
        return torch.empty(shape, dtype=dtype, device=device)
    kept = getattr(_kept, name, None)
    if kept is None or kept.dtype != dtype or kept.numel() < shape.numel():
        kept = torch.empty(shape.numel(), dtype=dtype)
        setattr(_kept, name, kept)
    return kept[: shape.numel()].view(shape)
