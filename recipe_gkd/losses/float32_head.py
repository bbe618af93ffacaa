"""Output layer that multiplies 16-bit hidden states and weights, and returns float32 logits without rounding.

A 16-bit output layer rounds logits between 16 and 32 to multiples of 1/8 (bfloat16), so that log-probabilities are
wrong by up to 0.06. vLLM computes logits in the same way with ``head_dtype=float32`` (``LogitsProcessor._get_logits``).

Shape suffixes: T positions, D hidden, W vocabulary columns of this rank, R positions or columns of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_BLOCK_ELEMENTS = 1 << 22
"""Elements of the weight that are converted to float32 at a time on a CPU."""


def float32_logits(hidden_TD: Tensor, weight_WD: Tensor) -> Tensor:
    """Return the logits in float32, differentiable, [T, W].

    The backward pass rounds the gradient of the logits to the data type of the weights, in the memory of that gradient,
    so that no second copy exists. The caller must not use the gradient of the logits elsewhere.

    Args:
        hidden_TD: Hidden states, in the data type of the weights.
        weight_WD: Weights of the output layer.
    """
    logits_TW: Tensor = _Float32Logits.apply(hidden_TD, weight_WD)
    return logits_TW


def matmul_float32(hidden_TD: Tensor, weight_WD: Tensor, out_TW: Tensor | None = None) -> Tensor:
    """Return ``hidden @ weight.T`` in float32, accumulated in float32, not differentiable, [T, W].

    Args:
        hidden_TD: Hidden states.
        weight_WD: Weights, in the same data type.
        out_TW: Memory for the result, float32.
    """
    if out_TW is None:
        out_TW = hidden_TD.new_empty(len(hidden_TD), len(weight_WD), dtype=torch.float32)
    if hidden_TD.dtype == torch.float32:
        return torch.mm(hidden_TD, weight_WD.T, out=out_TW)
    if hidden_TD.is_cuda:
        return torch.mm(hidden_TD, weight_WD.T, out_dtype=torch.float32, out=out_TW)
    # PyTorch has no such product for CPUs. A product of float32 copies has no rounding before the sum either.
    hidden_TD = hidden_TD.float()
    step = max(1, _CPU_BLOCK_ELEMENTS // weight_WD.shape[1])
    for start in range(0, len(weight_WD), step):
        block_RD = weight_WD[start : start + step].float()
        out_TW[:, start : start + step] = hidden_TD @ block_RD.T
    return out_TW


def round_in_place(values_TW: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in a 16-bit data type, written over the first half of the same memory.

    Row t of the result is written before row 2 t of the matrix, so rows [a, 2 a) can be converted at once when the rows
    before them are done.

    Args:
        values_TW: Contiguous float32 matrix. Its values are undefined afterwards.
        dtype: Data type of 2 bytes.
    """
    n_rows = len(values_TW)
    rounded_TW = values_TW.view(dtype).flatten()[: values_TW.numel()].view(values_TW.shape)
    if n_rows:
        rounded_TW[0] = values_TW[0].to(dtype)  # a copy: source and result overlap
    start = 1
    while start < n_rows:
        end = min(2 * start, n_rows)
        rounded_TW[start:end] = values_TW[start:end]
        start = end
    return rounded_TW


class _Float32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_WD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_WD)
        return matmul_float32(hidden_TD, weight_WD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_TD, weight_WD = ctx.saved_tensors
        grad_TW = grad_TW.contiguous()
        if weight_WD.dtype != torch.float32:
            grad_TW = round_in_place(grad_TW, weight_WD.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return grad_TW @ weight_WD if needs_hidden else None, grad_TW.T @ hidden_TD if needs_weight else None
