"""AdamW on the float32 shards, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_gkd.actor.fsdp.local_rows import local_rows
from recipe_gkd.config.schema import OptimConfig


def make_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW. Biases and norm weights have no weight decay, as with Megatron.

    Args:
        module: Sharded model.
        optim: Hyperparameters.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    decayed = [p for name, p in named if _is_decayed(name, p)]
    others = [p for name, p in named if not _is_decayed(name, p)]
    groups = [{"params": decayed, "wd_mult": 1.0}, {"params": others, "wd_mult": 0.0}]
    # `fused` must be explicit: by default DTensors are updated one after the other, with ten operations each.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=1e-8,
        weight_decay=0.0,
        fused=True,
    )


def _is_decayed(name: str, parameter: Tensor) -> bool:
    """Return True unless a parameter is a norm's weight or a bias. Those of joined experts are matrices."""
    return parameter.ndim > 1 and not name.endswith("bias")


@torch.no_grad()
def gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the global norm of the gradient. Collective."""
    norm = torch.nn.utils.get_total_norm(_gradients(optimizer))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@torch.no_grad()
def clip_and_step(optimizer: torch.optim.Optimizer, norm: float, lr: float, optim: OptimConfig) -> None:
    """Clip the gradient and update the weights.

    Args:
        optimizer: Optimizer of the sharded weights.
        norm: Global norm of the gradient.
        optim: Other hyperparameters. A loaded checkpoint has the values of the run that saved it.
    """
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = lr, optim.betas
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    if optim.clip_grad > 0:
        gradients = _gradients(optimizer)
        torch.nn.utils.clip_grads_with_norm_(
            _parameters(optimizer), optim.clip_grad, torch.tensor(norm, device=gradients[0].device)
        )
    optimizer.step()


@contextmanager
def keep_padding_rows(model: Any, n_token_ids: int) -> Iterator[None]:
    """Restore the padding rows of the vocabulary exactly after the optimizer step inside of this context.

    They have no gradient, but AdamW's weight decay would shrink them.

    Args:
        model: Sharded model of transformers.
        n_token_ids: Number of token ids. Rows from this index on are padding.
    """
    layers = [*_token_embeddings(model), model.get_output_embeddings()]
    weights = {id(layer.weight): layer.weight for layer in layers if layer is not None}
    local = [local_rows(weight) for weight in weights.values()]
    rows = [tensor[max(0, n_token_ids - first) :] for tensor, first in local]
    kept = [tensor.clone() for tensor in rows]
    yield
    with torch.no_grad():
        for tensor, before in zip(rows, kept, strict=True):
            tensor.copy_(before)


def _token_embeddings(model: Any) -> list[torch.nn.Embedding]:
    """Return the embeddings with a row for each token id. Gemma 4 has a second one, for the inputs of its layers."""
    first = model.get_input_embeddings()
    return [
        part for part in model.modules() if type(part) is type(first) and part.num_embeddings == first.num_embeddings
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
