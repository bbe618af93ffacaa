"""Export of the weights under Hugging Face names, for the rollout workers and for a saved folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.megatron.data_parallel import complete_weights
from recipe_gkd.actor.megatron.families.family import ShardSpec
from recipe_gkd.actor.megatron.hf_layout import join_shards, shard_size
from recipe_gkd.actor.megatron.hf_names import Weight
from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.weight_sync.bucket_plan import TensorMeta


def weights_meta(weights: Iterable[Weight], dtype: torch.dtype) -> list[TensorMeta]:
    """Return name, shape and dtype of each tensor that :func:`export_weights` yields for ``weights``, in order.

    All parameters have the dtype of training, including a router's, which is converted to float32 for its computation.

    Args:
        weights: Weights to export.

    Returns:
        Hugging Face name, complete shape, and name of the dtype of each tensor.
    """
    return [
        (name, size, str(_dtype(weight, dtype)).removeprefix("torch."))
        for weight in weights
        for name, size in weight.new_tensors
    ]


@torch.no_grad()
def export_weights(model: MegatronModel, first: int = 0, last: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Gather complete weights on global rank 0. Collective.

    The ranks that hold a weight send their shards directly to rank 0. Rank 0 holds one complete tensor at a time; the
    other ranks hold only their own shards. Only the first data-parallel replica takes part.

    Args:
        model: Model to export.
        first: Index of the first weight in ``model.weights``.
        last: Index after the last weight; None for all. All experts of a stack are in the range, or none.

    Yields:
        Hugging Face name and complete tensor on rank 0; nothing on the other ranks, which must exhaust the iterator as
        well. Weights with adapters are merged. A tensor may share memory with the model: do not write to it, and do not
        use it after the next update.
    """
    complete_weights(model.wrapped)
    stack: Tensor | None = None
    for (weight, parameter), stage in zip(model.weights[first:last], model.stages[first:last], strict=True):
        shard = None if parameter is None else partial(_export_shard, model, weight, parameter)
        for name, tensor in _gather(model, weight, stage, shard):
            if weight.stack is None:
                yield name, tensor
                continue
            [(_, size)] = weight.hf
            assert weight.expert is not None
            if stack is None:
                stack = tensor.new_empty(size)
            stack[weight.expert].copy_(tensor)
            if weight.expert == len(stack) - 1:
                yield name, stack
                stack = None


@torch.no_grad()
def export_adapters(model: MegatronModel) -> Iterator[tuple[str, Tensor]]:
    """Gather the complete factors of the adapters on global rank 0. Collective, as :func:`export_weights`.

    Yields:
        Name in a folder of peft and complete tensor on rank 0; nothing on the other ranks, or without adapters.
    """
    if model.lora is None:
        return
    complete_weights(model.wrapped)
    stages = {weight: stage for (weight, _), stage in zip(model.weights, model.stages, strict=True)}
    for base, factor, parameter in model.lora.factors():
        yield from _gather(model, factor, stages[base], None if parameter is None else parameter.detach)


def _export_shard(model: MegatronModel, weight: Weight, parameter: Tensor) -> Tensor:
    return parameter.detach() if model.lora is None else model.lora.merged(weight, parameter)


def _gather(
    model: MegatronModel, weight: Weight, stage: int, shard: Callable[[], Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the complete tensors of a weight on rank 0.

    Args:
        stage: Pipeline stage that has the weight.
        shard: Returns this rank's shard. It is called only on ranks that send their shard, and on rank 0. None: this
            rank does not have the weight.
    """
    layout = model.layout
    holders = _holders(model, weight, stage)
    if layout.rank == 0:
        size = shard_size(weight, model.dims, len(holders))
        shards = {
            rank: shard()
            if rank == 0 and shard is not None
            else torch.empty(size, dtype=_dtype(weight, model.dtype), device=model.device)
            for rank in holders
        }
        _exchange([dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in shards.items() if rank != 0])
        names = (name for name, _ in weight.hf)
        yield from zip(names, join_shards(weight, model.dims, list(shards.values())), strict=True)
    elif layout.rank in holders and shard is not None:
        _exchange([dist.P2POp(dist.isend, shard().contiguous(), 0)])


def _dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if weight.is_float32 else dtype


def _holders(model: MegatronModel, weight: Weight, stage: int) -> range:
    """Return the global ranks that hold the shards of a weight in the first replica, in order; see :class:`Layout`."""
    layout = model.layout
    first = stage * (layout.world_size // layout.pp_size)
    if weight.expert is None:
        return range(first, first + (1 if weight.shard_spec is ShardSpec.NONE else layout.tp_size))
    assert model.dims.moe is not None
    first += weight.expert // (model.dims.moe.experts // layout.ep_size) * layout.etp_size
    return range(first, first + layout.etp_size)


def _exchange(operations: list[dist.P2POp]) -> None:
    # A batch is used even for one operation: NCCL runs batches on the existing communicator, but may create a new one
    # per pair of ranks for single operations.
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
