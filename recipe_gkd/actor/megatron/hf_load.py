"""Loading of a Hugging Face folder into this rank's model chunks. Each rank reads only its own shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from recipe_gkd.actor.folder_reader import FolderReader
from recipe_gkd.actor.megatron.hf_layout import read_shard
from recipe_gkd.actor.megatron.hf_names import EMBEDDING, EXPERT, OUTPUT, Weight, weights
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.errors import ModelError

LocalWeight = tuple[Weight, Tensor | None]
"""A weight of the model and this rank's parameter or buffer for it; None if only other ranks have the weight."""


def local_weights(chunks: Sequence[GPTModel], dims: ModelDims, layout: Layout) -> list[LocalWeight]:
    """Return all weights of the model in order, each with this rank's parameter for it.

    Args:
        chunks: Model chunks of this rank.
        layout: Coordinates of this rank.
    """
    in_layers: dict[tuple[int, str], Tensor] = {}
    outside_layers: dict[str, Tensor] = {}
    for chunk in chunks:
        outside_layers |= {name: p for name, p in chunk.named_parameters() if not name.startswith("decoder.layers.")}
        for layer in chunk.decoder.layers:
            tensors = chain(layer.named_parameters(), layer.named_buffers())
            in_layers |= {(layer.layer_number - 1, name): tensor for name, tensor in tensors}

    experts = range(0)
    if dims.moe is not None:
        count = dims.moe.experts // layout.ep_size
        experts = range(layout.ep_rank * count, (layout.ep_rank + 1) * count)

    def find(weight: Weight) -> Tensor | None:
        if weight.expert is not None and weight.expert not in experts:
            return None
        for name in weight.mcore:
            if weight.expert is not None:
                name = name.replace(EXPERT, str(experts.index(weight.expert)))
            found = outside_layers.get(name) if weight.layer is None else in_layers.get((weight.layer, name))
            if found is not None:
                return found
        return None

    return [(weight, find(weight)) for weight in weights(dims)]


@torch.no_grad()
def load_hf(
    path: str | Path, chunks: Sequence[GPTModel], dims: ModelDims, layout: Layout, *, rounding_errors: bool = False
) -> bool:
    """Fill every parameter of ``chunks`` from a Hugging Face folder.

    Args:
        path: Folder with safetensors files.
        chunks: Model chunks of this rank.
        layout: Coordinates of this rank.
        rounding_errors: If True, parameters get what their data type has rounded away of the weights, instead of the
            weights, and buffers stay as they are.

    Returns:
        True if the data type of a parameter of this rank has rounded its weight.

    Raises:
        ModelError: A tensor is missing or has another shape, or a file cannot be read.
    """
    is_rounded = False
    unfilled = {id(p): name for chunk in chunks for name, p in chunk.named_parameters()}
    with FolderReader(Path(path)) as reader:
        for weight, parameter in local_weights(chunks, dims, layout):
            targets = [] if parameter is None else [parameter]
            if dims.tied and weight.mcore == (EMBEDDING,):  # a separate last stage has a copy of the tied embedding
                targets += [p for chunk in chunks for name, p in chunk.named_parameters() if name == OUTPUT]
            if not targets:
                continue
            for name, size in weight.hf:
                reader.expect(name, size)
            is_expert = weight.expert is not None
            rank, n_shards = (layout.etp_rank, layout.etp_size) if is_expert else (layout.tp_rank, layout.tp_size)
            shard = read_shard(weight, dims, reader.read, rank, n_shards)
            for target in targets:
                is_parameter = unfilled.pop(id(target), None) is not None
                is_rounded |= is_parameter and target.itemsize == 2 and target.dtype != shard.dtype
                if not rounding_errors:
                    target.copy_(shard)
                elif is_parameter:
                    target.copy_(shard - shard.to(target.dtype))
    if unfilled:
        names = tuple(unfilled.values())
        raise ModelError(
            f"{path}: the folder has no weights for these parameters: {', '.join(names)}", path=Path(path), names=names
        )
    return is_rounded
