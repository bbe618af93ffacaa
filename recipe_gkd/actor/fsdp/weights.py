"""Export of complete weights under Hugging Face names, for the rollout workers and for a saved folder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_gkd.weight_sync.bucket_plan import TensorMeta


def exported(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return name and shard of each weight and persistent buffer, in order; each tied weight once."""
    parameters = dict(module.named_parameters())
    seen = {id(parameter) for parameter in parameters.values()}
    saved = module.state_dict(keep_vars=True)
    buffers = {
        name: each for name, each in saved.items() if not isinstance(each, nn.Parameter) and id(each) not in seen
    }
    return [*parameters.items(), *buffers.items()]


def weights_meta(module: nn.Module, dtype: torch.dtype) -> list[list[TensorMeta]]:
    """Return name, complete shape and dtype of each tensor of :func:`export_weights`, in order.

    Args:
        module: Sharded model.
        dtype: Data type of exported weights.
    """
    return [
        [(name, tuple(tensor.shape), str(_dtype(tensor, dtype)).removeprefix("torch."))]
        for name, tensor in exported(module)
    ]


@torch.no_grad()
def export_weights(
    module: nn.Module, dtype: torch.dtype, *, is_first_rank: bool, first: int = 0, last: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Gather complete weights, one at a time. Collective.

    Args:
        module: Sharded model.
        dtype: Data type of exported weights.
        is_first_rank: True on rank 0.
        first: Index of the first weight.
        last: Index after the last weight; None for all.

    Yields:
        Name and tensor on rank 0; nothing on the other ranks, which must exhaust the iterator as well.
    """
    for name, shard in exported(module)[first:last]:
        tensor = shard.detach().to(_dtype(shard, dtype))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if is_first_rank:
            yield name, tensor


def _dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
