"""The weights in Hugging Face names, whole, on global rank 0: what the rollout workers and a saved folder are given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.hf_layout import join_shards, shard_size
from recipe_gkd.actor.hf_names import ShardSpec, Weight
from recipe_gkd.actor.model_dims import ModelDims
from recipe_gkd.actor.parallel import Layout
from recipe_gkd.weight_sync.bucket_plan import TensorMeta


def weights_meta(weights: Iterable[Weight], dtype: torch.dtype) -> list[TensorMeta]:
    """Return name, shape and dtype of each tensor that :func:`export_weights` yields for ``weights``, in its order.

    All weights are in the dtype of training. (So is a mixture's router; it is computed with in float32.)
    """
    return [(name, size, str(dtype).removeprefix("torch.")) for weight in weights for name, size in weight.hf]


def stages_of_weights(
    parameters: Sequence[tuple[Weight, Tensor | None]], layout: Layout, device: torch.device
) -> list[int]:
    """The pipeline stage that has each weight. Collective."""
    stages = torch.tensor([-1 if p is None else layout.pp_rank for _, p in parameters], device=device)
    dist.all_reduce(stages, op=dist.ReduceOp.MAX)
    return stages.tolist()


@torch.no_grad()
def export_weights(
    parameters: Sequence[tuple[Weight, Tensor | None]], stages: Sequence[int], shape: ModelDims, layout: Layout,
    device: torch.device, dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yields ``(name, tensor)`` on global rank 0, and nothing on the others, which must run it to its end all the same.

    The ranks that have a weight send their shards of it straight to rank 0: no other rank ever holds more than its own,
    and rank 0 holds one weight at a time. Only the first replica takes part. A tensor may share memory with the model
    (one that no rank cuts), so it is valid until the next update, and must not be written to.
    """
    for (weight, parameter), stage in zip(parameters, stages, strict=True):
        holders = _holders(weight, stage, shape, layout)
        own = None if parameter is None else parameter.detach()
        if layout.rank == 0:
            size = shard_size(weight, shape, len(holders))
            shards = {
                rank: own if rank == 0 and own is not None else torch.empty(size, dtype=dtype, device=device)
                for rank in holders
            }
            _exchange([dist.P2POp(dist.irecv, shard, rank) for rank, shard in shards.items() if rank != 0])
            names = (name for name, _ in weight.hf)
            yield from zip(names, join_shards(weight, shape, list(shards.values())), strict=True)
        elif layout.rank in holders and own is not None:
            _exchange([dist.P2POp(dist.isend, own.contiguous(), 0)])


def _holders(weight: Weight, stage: int, shape: ModelDims, layout: Layout) -> range:
    """Global ranks that have the shards of a weight in the first replica, in order; see :class:`Layout`."""
    first = stage * (layout.world_size // layout.pp_size)
    if weight.expert is None:
        return range(first, first + (1 if weight.cut is ShardSpec.NONE else layout.tp_size))
    assert shape.mixture is not None
    first += weight.expert // (shape.mixture.experts // layout.ep_size) * layout.etp_size
    return range(first, first + layout.etp_size)


def _exchange(operations: list[dist.P2POp]) -> None:
    # As a batch even if it is one: NCCL sends batches over the communicator that it has, and may make another for each
    # pair of ranks otherwise.
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
