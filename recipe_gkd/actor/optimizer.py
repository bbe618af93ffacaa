"""AdamW with fp32 copies, through Megatron; and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from recipe_gkd.config.schema import OptimConfig


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Of optimizer step ``step``, counted from 0: linear warm-up that ends at ``lr``, then the decay to ``min_lr``.

    The first step of a warm-up of W steps has lr / W, not 0; ``min_lr`` is reached at ``total_steps`` and kept.
    """
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = round(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    match optim.lr_decay_style:
        case "constant":
            return optim.lr
        case "linear":
            left = 1 - progress
        case "cosine":
            left = (1 + math.cos(math.pi * progress)) / 2
    return optim.min_lr + left * (optim.lr - optim.min_lr)


def wrap_and_optimize(
    chunks: Sequence[GPTModel], config: TransformerConfig, optim: OptimConfig, *, distributed: bool
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Gradient buffers around each chunk, and the optimizer over all of them. The weights must be loaded before."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = []
    for number, chunk in enumerate(chunks):
        module = _Bfloat16(config, chunk) if config.bf16 else chunk
        wrapped.append(DistributedDataParallel(config, ddp_config, module, disable_bucketing=number > 0))
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
            use_distributed_optimizer=distributed,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


class _Bfloat16(Float16Module):
    """Its logits stay bfloat16: the loss widens them in chunks, and a copy in float32 would be the peak of memory."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, fp32_output=False, **kwargs)


def set_hyperparameters(optimizer: MegatronOptimizer, lr: float, optim: OptimConfig) -> None:
    """Set learning rate, weight decay and betas as configured; to be called before every step.

    Megatron's parameter groups hold multipliers that nothing else applies, and a checkpoint brings the groups of the
    run that saved it.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
        group["betas"] = optim.betas


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Make the gradients ready, and return the norm of all of them, the same on every rank."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def clip_and_step(optimizer: MegatronOptimizer, norm: float, clip_grad: float) -> None:
    """After :func:`gradient_norm`, scale the gradients down to ``clip_grad`` (0: do not) and update the weights."""
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
