"""Megatron's AdamW with float32 copies of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipe_gkd.actor.megatron.data_parallel import enable_overlap
from recipe_gkd.config.schema import OptimConfig


def wrap_and_optimize(
    chunks: Sequence[GPTModel], config: TransformerConfig, optim: OptimConfig, ddp: DistributedDataParallelConfig
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Wrap each chunk with gradient buffers, and create the optimizer of all chunks.

    Load the weights before this call, because the optimizer copies them.

    Args:
        chunks: Model chunks of this rank, with loaded weights.
        config: Megatron's configuration. Its callbacks for gradients are set here.
        optim: Hyperparameters.
        ddp: Options of the gradient buffers; they also determine if the optimizer state is divided among the
            data-parallel ranks.

    Returns:
        The wrapped chunks and the optimizer.
    """
    wrapped = []
    for number, chunk in enumerate(chunks):
        module = _Bfloat16(config, chunk) if config.bf16 else chunk
        wrapped.append(DistributedDataParallel(config, ddp, module, disable_bucketing=number > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            clip_grad=optim.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    enable_overlap(config, wrapped)
    return wrapped, optimizer


@torch.no_grad()
def restore_rounding_errors(
    optimizer: MegatronOptimizer, chunks: Sequence[GPTModel], load_errors: Callable[[], object]
) -> None:
    """Add to the optimizer's float32 weights what the 16-bit parameters, which they are copies of, have rounded away.

    Otherwise all of them begin in the middle between two roundings, and the first updates, which are smaller than half
    of that distance, change no 16-bit weight: with a learning rate of 1e-4, five of six weights after the first step.

    Args:
        optimizer: Optimizer of the chunks.
        chunks: Model chunks of this rank, with rounded weights.
        load_errors: Function that sets the parameters to their rounding errors. These have 8 more bits.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    rounded = [torch.empty_like(each, device="cpu").copy_(each) for each in parameters]
    load_errors()
    errors = [main.detach().clone() for main in _copied_weights(optimizer)]
    for parameter, values in zip(parameters, rounded, strict=True):
        parameter.copy_(values)
    for main, error in zip(_copied_weights(optimizer), errors, strict=True):
        main.add_(error)


def _copied_weights(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Copy the parameters of the model to the optimizer's weights of this rank, and return these."""
    for part in optimizer.chained_optimizers:
        part.reload_model_params()
    return [weight for part in optimizer.chained_optimizers for weight in part.get_parameters()]


class _Bfloat16(Float16Module):
    """Wrapper that keeps the logits in bfloat16, and the buffers as they are.

    The loss converts the logits to float32 in chunks. A complete float32 copy would be the peak of the memory use.
    """

    def __init__(self, config: TransformerConfig, module: GPTModel) -> None:
        # Megatron would replace the routers' corrections and counts by rounded copies. Rounded corrections choose other
        # experts, and the weight table has the tensors from before the wrap.
        buffers = [(part, name, tensor) for part in module.modules() for name, tensor in part._buffers.items()]
        super().__init__(config, module)
        for part, name, tensor in buffers:
            part._buffers[name] = tensor

    def forward(self, *inputs: object, **kwargs: object) -> torch.Tensor:
        output: torch.Tensor = super().forward(*inputs, fp32_output=False, **kwargs)
        return output


def set_hyperparameters(optimizer: MegatronOptimizer, lr: float, optim: OptimConfig) -> None:
    """Set learning rate, weight decay and betas, and the implementation on CPUs. Call it before every step.

    Megatron's scheduler, which would apply the multipliers of the parameter groups, is not used. A loaded checkpoint
    contains the groups of the run that saved it, so this run's values are set again.

    Args:
        optimizer: Optimizer to change.
        optim: Weight decay and betas.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
        group["betas"] = optim.betas
        if "fused" in group and all(
            parameter.device.type == "cpu" for parameter in group["params"]
        ):  # torch's AdamW: five times as fast
            group["fused"], group["foreach"] = True, False


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Prepare the gradients for the step and return their global norm, the same on every rank. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def clip_and_step(optimizer: MegatronOptimizer, norm: float, clip_grad: float) -> None:
    """Clip the gradients and update the weights. Call :func:`gradient_norm` first.

    Args:
        optimizer: Optimizer with prepared gradients.
        norm: Global norm of the gradients.
        clip_grad: Maximum norm; 0 for no clipping.
    """
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
