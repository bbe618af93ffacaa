"""This rank's shard of the distributed optimizer's state, as parts of complete tensors in a checkpoint.

The distributed optimizer gives each data-parallel rank a range of the flattened parameters. A range of a parameter is a
union of few boxes: the rest of its first row, its complete rows, and the start of its last row. Each rank writes and
reads its boxes only. They are views of the optimizer's tensors, so that no rank allocates or receives the state of
another rank.

The tensors have the names and complete shapes of Megatron's format ``fully_reshardable``. A checkpoint can
therefore be loaded in any parallel layout, and checkpoints that Megatron's own functions wrote can be loaded too.
Megatron's functions gather the complete state of a model-parallel rank, 12 bytes per parameter, on every data-parallel
rank, when they save and when they load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

STATES = ("param", "exp_avg", "exp_avg_sq")

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size
ParamState = dict[int, dict[str, dict[int, ShardedTensor]]]  # number of the parameter -> state -> number of the box


def split_range(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Return the boxes whose elements are a range of a row-major tensor, in order.

    Args:
        shape: Shape of the tensor.
        start: Flat index of the first element.
        end: Flat index after the last element.

    Returns:
        Offset and size of each box, at most ``2 * len(shape) - 1``.
    """
    if len(shape) == 1:
        return [((start,), (end - start,))] if start < end else []
    boxes: list[Box] = []
    row = math.prod(shape[1:])
    while start < end:
        index, begin = divmod(start, row)
        n_rows = 0 if begin else (end - start) // row
        if n_rows:
            boxes.append(((index, *(0,) * (len(shape) - 1)), (n_rows, *shape[1:])))
            start += n_rows * row
        else:
            stop = min(end - index * row, row)
            boxes += [((index, *offset), (1, *size)) for offset, size in split_range(shape[1:], begin, stop)]
            start = index * row + stop
    return boxes


def sharded_param_state(optimizer: DistributedOptimizer, model_state: Mapping[str, Any]) -> ParamState:
    """Return this rank's part of the optimizer state as Megatron's sharded tensors. Not collective.

    Args:
        optimizer: Optimizer with allocated state.
        model_state: Megatron's sharded state of the model chunks, which has the position of each parameter in the
            complete model.

    Returns:
        Views of the optimizer's tensors. A load fills them in place.
    """
    found, _ = extract_sharded_tensors_and_factories(dict(model_state))
    of_parameter = {sharded.data: sharded for sharded in nested_values(found)}
    state: ParamState = {}
    for number, (parameter, start, end) in enumerate(_own_ranges(optimizer)):
        boxes = [
            (template, box)
            for first, template in _sharded_tensors(of_parameter[parameter])
            for box in split_range(
                template.local_shape, max(start - first, 0), min(end - first, math.prod(template.local_shape))
            )
        ]
        state[number] = {name: {} for name in STATES}
        for name, flat in _flat_states(optimizer, parameter).items():
            parts = flat.split([math.prod(size) for _, (_, size) in boxes])
            for index, ((template, box), part) in enumerate(zip(boxes, parts, strict=True)):
                state[number][name][index] = _box_of(template, box, part, name)
    return state


@torch.no_grad()
def load_param_state(optimizer: DistributedOptimizer, state: Mapping[int, Any]) -> None:
    """Copy a loaded state into the optimizer, whose tensors may have been replaced since the load.

    Args:
        optimizer: Optimizer that :func:`sharded_param_state` was called with.
        state: Result of that call, with a tensor in place of each sharded tensor.
    """
    for number, (parameter, _, _) in enumerate(_own_ranges(optimizer)):
        for name, flat in _flat_states(optimizer, parameter).items():
            loaded = [part.view(-1) for _, part in sorted(state[number][name].items())]
            for target, part in zip(flat.split([len(part) for part in loaded]), loaded, strict=True):
                if target.data_ptr() != part.data_ptr():
                    target.copy_(part)


def _own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yield each parameter that this rank has a part of, with the flat range of the part, always in the same order."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():  # one entry, for the dtype
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _flat_states(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    return {name: tensors[name].detach().view(-1) for name in STATES}


def _sharded_tensors(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[int, ShardedTensor]]:
    """Yield the sharded tensors of a parameter, with the flat index in the parameter at which each starts.

    There are several if the parameter has parts with different positions in the complete tensor: gate and up
    projection.
    """
    whole = sharded.data
    for tensor in [sharded] if isinstance(sharded, ShardedTensor) else nested_values(sharded.build()):
        assert tensor.data.is_contiguous() and tensor.data.untyped_storage() == whole.untyped_storage(), tensor.key
        yield tensor.data.storage_offset() - whole.storage_offset(), tensor


def _box_of(template: ShardedTensor, box: Box, part: Tensor, name: str) -> ShardedTensor:
    """Return a box of a state. ``axis_fragmentations=None`` marks shards that do not form a regular grid."""
    offset, size = box
    leading = template.prepend_axis_num
    size = (1,) * leading + size  # irregular shards with ``prepend_axis_num`` are not supported
    starts = zip(template.global_offset, (0,) * leading + offset, strict=True)
    return ShardedTensor(
        key=f"optimizer.state.{name}.{template.key}",
        data=part.view(size),
        dtype=part.dtype,
        local_shape=size,
        global_shape=template.global_shape,
        global_offset=tuple(first + relative for first, relative in starts),
        axis_fragmentations=None,
        replica_id=(*template.replica_id[:2], 0),  # each data-parallel rank has other elements
        allow_shape_mismatch=template.allow_shape_mismatch,
    )
