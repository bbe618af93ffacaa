"""Export of complete weights as the tensors of the model folder, for the rollout workers and for a saved folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_gkd.actor.fsdp.folder_tensors import StoredTensor, as_in_folder
from recipe_gkd.actor.fsdp.lora import base_state, layers_by_weight, merged_weight
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def weights_meta(module: nn.Module, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> list[list[TensorMeta]]:
    """Return name, complete shape and dtype of the tensors of :func:`export_weights`, for each weight in order.

    Args:
        module: Sharded model.
        stored: Result of :func:`~recipe_gkd.actor.fsdp.folder_tensors.stored_tensors`.
        dtype: Data type of exported parameters. Buffers keep theirs.
    """
    state = base_state(module)
    dtypes = {name: str(_dtype(state[name], dtype)).removeprefix("torch.") for name in stored}
    return [[(part, shape, dtypes[name]) for part, shape in form.shapes.items()] for name, form in stored.items()]


@torch.no_grad()
def export_weights(
    module: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    *,
    is_first_rank: bool,
    first: int = 0,
    last: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Gather complete weights, one at a time. Collective.

    Args:
        module: Sharded model.
        stored: Result of :func:`~recipe_gkd.actor.fsdp.folder_tensors.stored_tensors`.
        dtype: Data type of exported parameters. Buffers keep theirs.
        is_first_rank: True on rank 0.
        first: Index of the first weight.
        last: Index after the last weight; None for all.

    Yields:
        Name and tensor in the folder, on rank 0; nothing on the other ranks, which must exhaust the iterator as well.
    """
    adapted, state = layers_by_weight(module), base_state(module)
    for name, form in list(stored.items())[first:last]:
        shard = state[name]
        if layer := adapted.get(id(shard)):
            tensor = merged_weight(layer).to(dtype)
        else:
            tensor = shard.detach().to(_dtype(shard, dtype))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not is_first_rank:
            continue
        if form.is_joined:
            parts = as_in_folder(module, name, tensor)
            yield from ((part, parts[part].contiguous()) for part in form.shapes)
        else:
            yield from ((part, tensor) for part in form.shapes)


def _dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of an export. Buffers, such as a router's correction, keep the one of their computation."""
    return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
