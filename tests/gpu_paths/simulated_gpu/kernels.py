"""Operators that only GPUs have, computed with others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    """Add the operators for CUDA tensors."""
    global _library  # a library that is deleted removes its operators
    _library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "mm.dtype": _mm_dtype,
        "mm.dtype_out": _mm_dtype_out,
        "_flash_attention_forward": _flash_attention_forward,
        "_flash_attention_backward": _flash_attention_backward,
    }.items():
        _library.impl(name, kernel, "CUDA")


_library: torch.library.Library


def _mm_dtype(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(left.to(out_dtype), right.to(out_dtype))


def _mm_dtype_out(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(_mm_dtype(left, right, out_dtype))


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_mask: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return causal attention within the sequences, [N, H, D], and values that this backward pass does not need."""
    assert (
        (is_causal or options.get("window_size_right") == 0)
        and not dropout
        and query.dtype in (torch.bfloat16, torch.float16)
    )
    output = torch.empty_like(query)
    for first, last in _sequences(starts_q):
        weights, _, _, v, _ = _weights(query, key, value, first, last, options)
        output[first:last] = (weights @ v).transpose(0, 1)
    logsumexp = query.new_zeros(query.size(1), len(query), dtype=torch.float32)
    return output, logsumexp, query.new_zeros(2, dtype=torch.int64), query.new_zeros(0), query.new_zeros(0)


def _flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    starts_q: Tensor,
    *_: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    gradients = tuple(torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
    for first, last in _sequences(starts_q):
        weights, q, k, v, scale = _weights(query, key, value, first, last, options)
        grad_output = gradient[first:last].transpose(0, 1).float()
        grad_weights = grad_output @ v.mT
        grad_scores = scale * weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
        found = grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_output
        for total, each in zip(gradients, found, strict=True):  # query heads that share a key are summed
            total[first:last] = each.unflatten(0, (total.size(1), -1)).sum(1).transpose(0, 1)
    return tuple(each.to(query.dtype) for each in gradients)


def _sequences(starts: Tensor) -> Iterable[tuple[int, int]]:
    """Return the bounds of each sequence. A kernel reads them in the memory of the device: the host does not wait."""
    torch.ops.simulated_gpu.launch()
    bounds = list((ctypes.c_int32 * len(starts)).from_address(starts.data_ptr()))
    return pairwise(bounds)


def _weights(
    query: Tensor, key: Tensor, value: Tensor, first: int, last: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return the weights of one sequence, [H, S, S], its queries, keys and values, [H, S, D], and the scale."""
    left = options.get("window_size_left")
    copies = query.size(1) // key.size(1)
    q, k, v = (each[first:last].transpose(0, 1).float() for each in (query, key, value))
    k, v = (each.repeat_interleave(copies, dim=0) for each in (k, v))
    scale = options.get("scale") or query.size(-1) ** -0.5
    places = torch.arange(last - first, device=query.device)
    distance = places[:, None] - places
    is_hidden = distance < 0
    if left is not None and left >= 0:
        is_hidden |= distance > left
    return (scale * q @ k.mT).masked_fill(is_hidden, -torch.inf).softmax(dim=-1), q, k, v, scale
