"""Low-rank adapters (LoRA) on Megatron's tensor-parallel linear layers.

A layer of Megatron joins up to three layers of transformers, each with its own factors A and B. One product with all A
and one with all B computes the adapters of the layer. The smaller side of an adapter is what tensor-parallel ranks
exchange:

=============== ============ ============ =========================================== ================================
Layer           A            B            Forward pass                                Gradient summed over the ranks
=============== ============ ============ =========================================== ================================
column-parallel replicated   rows         ``x A`` is gathered (sequence parallelism)  of A, with sequence parallelism
row-parallel    columns      replicated   ``x A`` is summed before B                  of B, with sequence parallelism
replicated      replicated   replicated   of this rank's rows                         of both, with sequence parallelism
=============== ============ ============ =========================================== ================================

With sequence parallelism a replicated factor gets the gradient of this rank's part of the sequence. Its attribute
``sequence_parallel`` makes Megatron sum it (distributed/finalize_model_grads.py
``_allreduce_non_tensor_model_parallel_grads``). Without it, the gradient is complete on each rank. The attribute
``tensor_model_parallel`` marks divided factors; the gradient norm counts all others once.

Shape suffixes: N tokens of a row, I inputs and O outputs of a layer on this rank, R ranks of all adapters of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parametrize

from recipe_gkd.actor.lora import initial_factor
from recipe_gkd.actor.megatron.families.family import ShardSpec
from recipe_gkd.actor.megatron.hf_layout import fuse_rows, read_shard, shard_size
from recipe_gkd.actor.megatron.hf_names import Weight
from recipe_gkd.actor.megatron.lora_table import SHARED_EXPERT_GATE, AdaptedWeight
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.config.schema import LoraConfig


class Adapter(nn.Module):
    """Factors of the adapters of one weight on this rank. The base class computes nothing.

    Args:
        weight: Weight and its adapters.
        dims: Dimensions of the model.
        config: Rank, scale and dropout.
        layout: Coordinates of this rank.
        like: This rank's parameter of the weight, for device and data type.
        seed: Seed of the factors A.
    """

    def __init__(
        self, weight: AdaptedWeight, dims: ModelDims, config: LoraConfig, layout: Layout, like: Tensor, seed: int
    ) -> None:
        super().__init__()
        assert config.rank is not None
        self.weight, self._dims, self._tp_size = weight, dims, layout.tp_size
        self.rank, self.scale, self.dropout = config.rank, config.alpha / config.rank, config.dropout
        # Parameters of this module, not of a list: `overlap_param_gather` completes the parameters of a module when its
        # forward method is called.
        for index, (layer, (a, b)) in enumerate(zip(weight.layers.values(), weight.factors, strict=True)):
            [(_, (_, n_inputs))] = a.hf
            read = partial(_read_slice, initial_factor(layer, self.rank, n_inputs, seed))
            shard_RI = read_shard(a, dims, read, layout.tp_rank, layout.tp_size)
            self.register_parameter(f"a{index}", nn.Parameter(shard_RI.to(like.device, like.dtype, copy=True)))
            self.register_parameter(f"b{index}", nn.Parameter(like.new_zeros(shard_size(b, dims, layout.tp_size))))
        self.eval()  # without dropout

    @property
    def a(self) -> list[nn.Parameter]:
        """Factors A on this rank."""
        return [self.get_parameter(f"a{index}") for index in range(len(self.weight.layers))]

    @property
    def b(self) -> list[nn.Parameter]:
        """Factors B on this rank."""
        return [self.get_parameter(f"b{index}") for index in range(len(self.weight.layers))]

    def mark_shards(self, *, sequence_parallel: bool) -> None:
        """Set the attributes that Megatron's gradient reduction and gradient norm read."""
        for factor, parameter in self.factors():
            axis = shard_axis(factor)
            if axis is None:
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)

    def factors(self) -> Iterator[tuple[Weight, nn.Parameter]]:
        """Yield each factor with this rank's parameter for it, in the order of the table."""
        for (weight_a, weight_b), a, b in zip(self.weight.factors, self.a, self.b, strict=True):
            yield weight_a, a
            yield weight_b, b

    def outputs_OR(self) -> Tensor:
        """Return the factors B of all adapters as one matrix, with the rows of the weight; 0 outside of its blocks."""
        shapes = [size for _, size in self.weight.base.hf]
        if len(shapes) == 1:
            return self.b[0]
        blocks, position, width = [], 0, len(self.b) * self.rank
        for index, (n_rows, _) in enumerate(shapes):
            if index in self.weight.layers:
                before = position * self.rank
                blocks.append(F.pad(self.b[position], (before, width - before - self.rank)))
                position += 1
            else:
                blocks.append(self.b[0].new_zeros(n_rows // self._tp_size, width))
        return fuse_rows(self.weight.base, self._dims, blocks, self._tp_size)

    def merged_with(self, parameter: Tensor) -> Tensor:
        """Return a parameter with its adapters, ``W + alpha / rank B A``, computed in float32, in the dtype of W."""
        delta_OI = self.outputs_OR().float() @ torch.cat(tuple(self.a)).float() * self.scale
        return (parameter.float() + delta_OI).to(parameter.dtype)

    def _project(self, input_N1I: Tensor) -> Tensor:
        """Return ``alpha / rank x A`` of all adapters, [N, 1, R]. Each adapter has its own dropout, as in peft."""
        if self.training and self.dropout:
            parts = [F.linear(F.dropout(input_N1I, self.dropout), a_RI) for a_RI in self.a]
            return torch.cat(parts, dim=-1) * self.scale
        return F.linear(input_N1I, torch.cat(tuple(self.a))) * self.scale


class ColumnParallelAdapter(Adapter):
    """Adapters of a column-parallel layer."""

    def forward(self, input_N1I: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        """Return what is added to the layer's output, [N, 1, O]."""
        hidden_N1R = self._project(input_N1I)
        if sequence_parallel:
            hidden_N1R = gather_from_sequence_parallel_region(hidden_N1R, group=group)
        else:  # the gradient is summed over the ranks, each of which has other outputs
            hidden_N1R = copy_to_tensor_model_parallel_region(hidden_N1R, group=group)
        return F.linear(hidden_N1R, self.outputs_OR())


class RowParallelAdapter(Adapter):
    """Adapters of a row-parallel layer."""

    def forward(self, input_N1I: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        """Return what is added to the layer's output after its reduction, [N, 1, O]."""
        reduce = reduce_scatter_to_sequence_parallel_region if sequence_parallel else _reduce
        return F.linear(reduce(self._project(input_N1I), group=group), self.outputs_OR())


class ReplicatedAdapter(Adapter):
    """Adapter of a layer that all tensor-parallel ranks have, and compute for their part of the sequence."""

    def forward(self, input_N1I: Tensor, *, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        """Return what is added to the layer's output, [N, 1, O]."""
        return F.linear(self._project(input_N1I), self.outputs_OR())


class GateAdapter(Adapter):
    """Adapter of the gate of a shared expert, whose weight is multiplied by Megatron's module of all shared experts.

    It has one output, so it is added to the weight instead of the output.
    """

    def forward(self, weight_1I: Tensor) -> Tensor:
        """Return the weight with its adapter."""
        return weight_1I + self.b[0] @ self.a[0] * self.scale


def attach(adapter: Adapter, module: nn.Module, name: str, config: TransformerConfig) -> None:
    """Make a module of Megatron compute an adapter.

    Args:
        adapter: New adapter.
        module: Module that has the weight.
        name: Name of the weight in the module.
        config: Megatron's configuration.
    """
    if isinstance(adapter, GateAdapter):
        adapter.mark_shards(sequence_parallel=config.sequence_parallel)
        parametrize.register_parametrization(module, name, adapter, unsafe=True)
        return
    layer: Any = module
    sequence_parallel = getattr(layer, "sequence_parallel", config.sequence_parallel)
    adapter.mark_shards(sequence_parallel=sequence_parallel)

    def add_adapter(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        delta = adapter(args[0], group=layer.tp_group, sequence_parallel=sequence_parallel)
        return output[0] + delta, output[1]

    layer.add_module("lora", adapter)
    layer.register_forward_hook(add_adapter)


def adapter_class(weight: Weight) -> type[Adapter]:
    """Return the class of the adapters of a weight."""
    if weight.mcore == (SHARED_EXPERT_GATE,):
        return GateAdapter
    classes = {ShardSpec.COLUMNS: RowParallelAdapter, ShardSpec.NONE: ReplicatedAdapter}
    return classes.get(weight.shard_spec, ColumnParallelAdapter)


def shard_axis(factor: Weight) -> int | None:
    """Return the dimension of a factor that tensor-parallel ranks divide; None if it is replicated."""
    return {ShardSpec.NONE: None, ShardSpec.COLUMNS: 1}.get(factor.shard_spec, 0)


def _read_slice(tensor: Tensor, _: str, index: tuple[slice, ...]) -> Tensor:
    return tensor[index or ...]


def _reduce(tensor: Tensor, *, group: ProcessGroup) -> Tensor:
    reduced: Tensor = reduce_from_tensor_model_parallel_region(tensor, group=group)
    return reduced
