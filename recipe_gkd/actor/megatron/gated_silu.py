"""Gated activation of an MLP, ``silu(gate) * up`` (Shazeer 2020, arXiv:2002.05202).

Megatron's own code adds a zero to ``up`` and concatenates the two halves of the gradient, which needs time and memory
for copies of the MLP's hidden states. Here the gradient is written over the input. On a GPU, one Triton kernel for each
pass reads the two halves, which PyTorch's kernels read without vector instructions, and ``silu(gate)`` is computed
again instead of stored. The results of PyTorch's operations are equal to Megatron's bit by bit.

Shape suffixes: F columns of ``gate`` and of ``up`` on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recipe_gkd.losses.autograd_context import SavedTensors
from recipe_gkd.losses.kernel_backend import runs_triton

BLOCK_COLUMNS = 2048


class GatedSilu(torch.nn.Module):
    """Module in the place of Transformer Engine's activation; see ``use_te_activation_func`` in Megatron's MLP."""

    def __init__(self, config: object = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Return the activation, [..., F].

        Args:
            gate_and_up: ``gate`` and ``up`` in the last dimension, [..., 2 F]. The backward pass writes its gradient
                over it, so no other operation may need it. A second backward pass raises PyTorch's error about a
                modified tensor.
        """
        uses_triton = runs_triton(gate_and_up) and gate_and_up.is_contiguous()
        activated: Tensor = (_TritonGatedSilu if uses_triton else _GatedSilu).apply(gate_and_up)
        return activated

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """Return an empty state: the module has no parameters."""
        return {}


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedTensors, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_and_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient: Tensor) -> Tensor:
        gate_and_up, activated = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad_activated = gradient * up
        torch.mul(gradient, activated, out=up)
        torch.ops.aten.silu_backward.grad_input(grad_activated, gate, grad_input=gate)
        return gate_and_up


class _TritonGatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedTensors, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        *shape, width = gate_and_up.shape
        out = gate_and_up.new_empty(*shape, width // 2)
        _launch("write_gated_silu", out, gate_and_up, like=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        _launch("write_gated_silu_gradient", gate_and_up, gradient, like=gradient)
        torch.autograd.graph.increment_version(gate_and_up)  # PyTorch does not see the writes of a kernel
        return gate_and_up


def _launch(name: str, *tensors: Tensor, like: Tensor) -> None:
    """Launch a kernel of :mod:`~recipe_gkd.actor.megatron.triton_kernels` for tensors with the rows of ``like``."""
    from recipe_gkd.actor.megatron import triton_kernels

    if not like.numel():
        return
    width = like.shape[-1]
    grid = like.numel() // width, -(-width // BLOCK_COLUMNS)
    with torch.cuda.device_of(like):
        getattr(triton_kernels, name)[grid](*tensors, width, BLOCK=BLOCK_COLUMNS, num_warps=8)
