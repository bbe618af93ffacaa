"""The weights in Hugging Face names, whole, on global rank 0: what the rollout workers and a saved folder are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from recipe_gkd.actor.hf_layout import join_shards
from recipe_gkd.actor.hf_names import Cut, Weight, weights
from recipe_gkd.actor.parallel import Layout
from recipe_gkd.actor.shape import ModelShape
from recipe_gkd.weights.buckets import TensorMeta


def weights_meta(shape: ModelShape, dtype: torch.dtype) -> list[TensorMeta]:
    """What :func:`export_weights` yields, in its order.

    All weights of a dense model are in the dtype of training. (A mixture's router may be float32: say so here then.)
    """
    return [(name, size, str(dtype).removeprefix("torch.")) for weight in weights(shape) for name, size in weight.hf]


def stages_of_weights(
    parameters: Sequence[tuple[Weight, Tensor | None]], layout: Layout, device: torch.device
) -> list[int]:
    """The pipeline stage that has each weight. Collective within the pipeline group."""
    stages = torch.tensor([-1 if p is None else layout.pp_rank for _, p in parameters], device=device)
    dist.all_reduce(stages, op=dist.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group())
    return stages.tolist()


@torch.no_grad()
def export_weights(
    parameters: Sequence[tuple[Weight, Tensor | None]], stages: Sequence[int], shape: ModelShape, layout: Layout,
    device: torch.device, dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yields ``(name, tensor)`` on global rank 0, and nothing on the others, which must run it to its end all the same.

    Each weight is gathered over the tensor-parallel group of its stage to that group's first rank, and sent from there
    to rank 0: no other rank ever holds a whole tensor, and rank 0 holds one at a time. Only the first data-parallel
    replica takes part. A tensor may share memory with the model (one that no rank cuts), so it is valid until the
    next is asked for, and must not be written to.
    """
    if layout.dp_rank != 0:
        return
    ranks_per_stage = layout.world_size // layout.pp_size
    for (weight, parameter), stage in zip(parameters, stages, strict=True):
        sender = stage * ranks_per_stage  # tensor-parallel rank 0 of replica 0 of that stage
        tensors: list[Tensor] = []
        if parameter is not None:
            shards = _gather(parameter.detach(), weight, layout, sender)
            tensors = join_shards(weight, shape, shards) if shards else []
        if sender != 0:
            if layout.rank == 0:
                tensors = [torch.empty(size, dtype=dtype, device=device) for _, size in weight.hf]
            for tensor in tensors:
                if layout.rank == 0:
                    dist.recv(tensor, src=sender, group=mpu.get_pipeline_model_parallel_group())
                else:
                    dist.send(tensor, dst=0, group=mpu.get_pipeline_model_parallel_group())
        if layout.rank == 0:
            yield from zip((name for name, _ in weight.hf), tensors, strict=True)


def _gather(shard: Tensor, weight: Weight, layout: Layout, root: int) -> list[Tensor]:
    """All shards on global rank ``root``, an empty list on the other ranks of its tensor-parallel group."""
    if weight.cut is Cut.NONE or layout.tp_size == 1:
        return [shard] if layout.tp_rank == 0 else []
    shards = [torch.empty_like(shard) for _ in range(layout.tp_size)] if layout.rank == root else None
    dist.gather(shard.contiguous(), shards, dst=root, group=mpu.get_tensor_model_parallel_group())
    return shards or []
