"""Adjustments to Megatron's experts."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn


def adjust_experts(chunk: GPTModel) -> None:
    """Separate the buffers of the experts' gradients, and let experts have biases.

    Args:
        chunk: New model chunk, before it is wrapped.
    """
    _separate_buffers(chunk)
    for part in chunk.modules():
        if isinstance(part, SequentialMLP) and part.config.add_bias_linear:
            for expert in part.local_experts:
                _allow_bias(expert.linear_fc2)


def _separate_buffers(chunk: GPTModel) -> None:
    """Mark all expert parameters as such, so that they get their own gradient buffers and optimizer.

    The gradients of these parameters are summed over the experts' data-parallel group. Megatron marks experts only if
    expert parallelism divides them (tensor_parallel/layers.py ``setattr(self.weight, "allreduce", ...)``). Marking all
    experts is also correct if each tensor-parallel rank has all experts and its own tokens. It lets a checkpoint move
    between layouts with and without expert parallelism.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _allow_bias(layer: Any) -> None:
    """Make the bias of a row-parallel layer of an expert, which is not divided, work as its weight does.

    Megatron marks it as replicated in the tensor-parallel group, which is a part of the experts' data-parallel group:
    its gradient would be summed twice, and be missing in the gradient norm of all ranks but the first.
    """
    layer.bias.sequence_parallel = False
    set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
    layer.register_forward_hook(_copy_output)


def _copy_output(_: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Copy an output to which Megatron adds the bias in place.

    Without sequence and expert parallelism it is the result of another function, which autograd refuses to change.
    """
    return output[0].clone(), output[1]
