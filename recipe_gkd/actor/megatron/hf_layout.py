"""Conversion between the shard of a Megatron parameter and the Hugging Face tensors that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recipe_gkd.actor.megatron.families.family import ShardSpec, Stack
from recipe_gkd.actor.megatron.hf_names import Weight
from recipe_gkd.actor.megatron.model_dims import ModelDims

ReadSlice = Callable[[str, tuple[slice, ...]], Tensor]
"""Function that reads a slice of a named Hugging Face tensor; ``()`` stands for the whole tensor."""


def read_shard(weight: Weight, dims: ModelDims, read: ReadSlice, tp_rank: int, tp_size: int) -> Tensor:
    """Read one rank's shard of a weight.

    Args:
        weight: Weight to read.
        read: Reads slices of the Hugging Face tensors. Only the data of the shard is requested.
        tp_rank: Rank in the group that divides the weight.
        tp_size: Size of this group.

    Returns:
        The shard, with the shape that :func:`shard_size` returns. Padding rows of the vocabulary are 0.
    """

    def rows(index: int) -> Tensor:
        part = weight.parts[index]
        count = part.shape[0] // tp_size
        first = part.first + tp_rank * count
        return read(part.name, (slice(first, first + count),))

    if weight.stack is not None:
        [part] = weight.parts
        return _from_stack(weight.stack, read(part.name, (slice(part.first, part.first + 1),))[0])
    name, size = weight.hf[0]
    match weight.shard_spec:
        case ShardSpec.NONE:
            return read(name, ())
        case ShardSpec.VOCAB:
            count = dims.padded_vocab(tp_size) // tp_size
            start, stop = (min(row, size[0]) for row in (tp_rank * count, (tp_rank + 1) * count))
            real = read(name, (slice(start, stop),)) if stop > start else torch.zeros(0, *size[1:])
            return torch.cat([real, real.new_zeros(count - (stop - start), *size[1:])])
        case ShardSpec.ROWS:
            return rows(0)
        case ShardSpec.COLUMNS:
            count = size[1] // tp_size
            return read(name, (slice(None), slice(tp_rank * count, (tp_rank + 1) * count)))
        case ShardSpec.QKV | ShardSpec.GATE_UP:
            return fuse_rows(weight, dims, [rows(index) for index in range(len(weight.parts))], tp_size)


def fuse_rows(weight: Weight, dims: ModelDims, parts: Sequence[Tensor], tp_size: int) -> Tensor:
    """Return the rows of one rank's parameter from the rank's rows of each of its parts.

    Args:
        weight: Weight that is divided by rows.
        parts: Rows of the tensors, in the order of ``weight.parts``.
        tp_size: Size of the group that divides the weight.
    """
    if weight.shard_spec is not ShardSpec.QKV:
        return torch.cat(tuple(parts))
    groups = dims.kv_heads // tp_size
    return torch.cat([part.unflatten(0, (groups, part.size(0) // groups)) for part in parts], dim=1).flatten(0, 1)


def shard_size(weight: Weight, dims: ModelDims, n_shards: int) -> tuple[int, ...]:
    """Return the shape of each of ``n_shards`` shards of a weight."""
    if weight.stack is not None:
        shape = weight.parts[0].shape
        return shape[::-1] if weight.stack.transposed else shape
    _, size = weight.hf[0]
    match weight.shard_spec:
        case ShardSpec.NONE:
            return size
        case ShardSpec.VOCAB:
            return (dims.padded_vocab(n_shards) // n_shards, *size[1:])
        case ShardSpec.COLUMNS:
            return (size[0], size[1] // n_shards)
        case ShardSpec.ROWS | ShardSpec.QKV | ShardSpec.GATE_UP:
            return (sum(rows for _, (rows, *_) in weight.hf) // n_shards, *size[1:])


def join_shards(weight: Weight, dims: ModelDims, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the Hugging Face tensors of a weight, contiguous, in the order of ``weight.hf``; of a stack, its own part.

    Args:
        weight: Weight to convert.
        shards: Shards of all ranks of the group, in order; one tensor if the weight is replicated.
    """
    if weight.stack is not None:
        return [_to_stack(weight.stack, shards[0])]
    match weight.shard_spec:
        case ShardSpec.NONE:
            parts = [shards[0]]
        case ShardSpec.VOCAB:
            parts = [torch.cat(tuple(shards))[: dims.vocab_size]]
        case ShardSpec.ROWS:
            parts = [torch.cat(tuple(shards))]
        case ShardSpec.COLUMNS:
            parts = [torch.cat(tuple(shards), dim=1)]
        case ShardSpec.QKV:
            grouped = torch.cat(tuple(shards)).unflatten(0, (dims.kv_heads, -1))
            widths = [dims.heads // dims.kv_heads * dims.head_dim, dims.head_dim, dims.head_dim]
            parts = [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]
        case ShardSpec.GATE_UP:
            halves = [shard.chunk(2) for shard in shards]
            parts = [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]
    if len(weight.hf) < len(parts):
        parts = [torch.cat(parts)]  # the rows of one tensor
    return [tensor.contiguous() for tensor in parts]


def _from_stack(stack: Stack, stored: Tensor) -> Tensor:
    """Return the parameter of an expert: of a matrix [out, in], with the rows of gate before those of up."""
    parameter = stored.mT if stack.transposed else stored
    return torch.cat([parameter[0::2], parameter[1::2]]) if stack.interleaved else parameter


def _to_stack(stack: Stack, parameter: Tensor) -> Tensor:
    """Return the part of an expert in the tensor of all of them."""
    stored = torch.stack(parameter.chunk(2), dim=1).flatten(0, 1) if stack.interleaved else parameter
    return (stored.mT if stack.transposed else stored).contiguous()
