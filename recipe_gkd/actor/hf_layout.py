"""One rank's shard of a weight <-> the Hugging Face tensors that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recipe_gkd.actor.hf_names import ShardSpec, Weight
from recipe_gkd.actor.model_dims import ModelDims

ReadPart = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads a part of a named Hugging Face tensor from its file."""


def read_shard(weight: Weight, shape: ModelDims, read: ReadPart, tp_rank: int, tp_size: int) -> Tensor:
    """What rank ``tp_rank`` of the group that cuts ``weight`` holds of it, reading no more than that."""

    def rows(index: int) -> Tensor:
        name, size = weight.hf[index]
        count = size[0] // tp_size
        return read(name, (slice(tp_rank * count, (tp_rank + 1) * count),))

    name, size = weight.hf[0]
    match weight.cut:
        case ShardSpec.NONE:
            return read(name, ())
        case ShardSpec.VOCAB:
            count = shape.padded_vocab(tp_size) // tp_size
            start, stop = (min(row, size[0]) for row in (tp_rank * count, (tp_rank + 1) * count))
            real = read(name, (slice(start, stop),)) if stop > start else torch.zeros(0, *size[1:])
            return torch.cat([real, real.new_zeros(count - (stop - start), *size[1:])])
        case ShardSpec.COLUMNS:
            count = size[1] // tp_size
            return read(name, (slice(None), slice(tp_rank * count, (tp_rank + 1) * count)))
        case ShardSpec.QKV:
            groups = shape.kv_heads // tp_size
            parts = [part.unflatten(0, (groups, part.size(0) // groups)) for part in map(rows, range(3))]
            return torch.cat(parts, dim=1).flatten(0, 1)
        case ShardSpec.GATE_UP:
            return torch.cat([rows(0), rows(1)])


def shard_size(weight: Weight, shape: ModelDims, parts: int) -> tuple[int, ...]:
    """Of what each of ``parts`` ranks holds of ``weight``."""
    _, size = weight.hf[0]
    match weight.cut:
        case ShardSpec.NONE:
            return size
        case ShardSpec.VOCAB:
            return (shape.padded_vocab(parts) // parts, *size[1:])
        case ShardSpec.COLUMNS:
            return (size[0], size[1] // parts)
        case ShardSpec.QKV | ShardSpec.GATE_UP:
            return (sum(rows for _, (rows, *_) in weight.hf) // parts, *size[1:])


def join_shards(weight: Weight, shape: ModelDims, shards: Sequence[Tensor]) -> list[Tensor]:
    """The Hugging Face tensors of ``weight``, contiguous, from all shards of a group, or from one if not cut."""
    match weight.cut:
        case ShardSpec.NONE:
            tensors = [shards[0]]
        case ShardSpec.VOCAB:
            tensors = [torch.cat(tuple(shards))[: shape.vocab_size]]
        case ShardSpec.COLUMNS:
            tensors = [torch.cat(tuple(shards), dim=1)]
        case ShardSpec.QKV:
            grouped = torch.cat(tuple(shards)).unflatten(0, (shape.kv_heads, -1))
            widths = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
            tensors = [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]
        case ShardSpec.GATE_UP:
            halves = [shard.chunk(2) for shard in shards]
            tensors = [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]
    return [tensor.contiguous() for tensor in tensors]
