"""Low-rank adapters (LoRA) of the Megatron backend: which parameters are trained, saved, and merged for an export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from recipe_gkd.actor.megatron.families.family import ShardSpec
from recipe_gkd.actor.megatron.hf_load import LocalWeight
from recipe_gkd.actor.megatron.hf_names import Weight
from recipe_gkd.actor.megatron.lora_layers import Adapter, GateAdapter, adapter_class, attach, shard_axis
from recipe_gkd.actor.megatron.lora_table import AdaptedWeight
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.config.keys import LORA, MEGATRON
from recipe_gkd.config.schema import LoraConfig
from recipe_gkd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MegatronLora:
    """Adapters of a model.

    Attributes:
        config: Rank, scale and dropout.
        weights: All weights of the model with adapters, in order, each with this rank's adapters for it; None if only
            other ranks have them.
    """

    config: LoraConfig
    weights: Sequence[tuple[AdaptedWeight, Adapter | None]]

    @cached_property
    def _adapters(self) -> dict[Weight, Adapter | None]:
        return {weight.base: adapter for weight, adapter in self.weights}

    @property
    def layers(self) -> list[str]:
        """Names of the Hugging Face layers with an adapter."""
        return [name for weight, _ in self.weights for name in weight.layers.values()]

    def factors(self) -> Iterator[tuple[Weight, Weight, Tensor | None]]:
        """Yield the base weight and each of its factors, with this rank's parameter for the factor."""
        for weight, adapter in self.weights:
            own = {} if adapter is None else {factor.hf: parameter for factor, parameter in adapter.factors()}
            for factor in (factor for pair in weight.factors for factor in pair):
                yield weight.base, factor, own.get(factor.hf)

    def merged(self, weight: Weight, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a weight for an export: the parameter itself if it has no adapter."""
        adapter = self._adapters.get(weight)
        return parameter.detach() if adapter is None else adapter.merged_with(parameter.detach())

    def about(self) -> dict[str, Any]:
        """Return the settings that a checkpoint of adapters must have."""
        return {"lora_rank": self.config.rank, "lora_alpha": self.config.alpha, "target_modules": sorted(self.layers)}

    def sharded_state(self) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Return this rank's factors by name, as Megatron's sharded tensors. Base weights are not included."""
        groups = {
            "tp_group": mpu.get_tensor_model_parallel_group(),
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        state: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        for _, factor, parameter in self.factors():
            if parameter is None:
                continue
            name, axis = factor.hf[0][0], shard_axis(factor)
            if axis is None:
                state[name] = make_sharded_tensor_for_checkpoint(parameter, name, **groups)
            else:
                state[name] = make_tp_sharded_tensor_for_checkpoint(parameter, name, axis, **groups)
            if factor.shard_spec is ShardSpec.GATE_UP:  # two ranges of rows on each rank
                state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets=())
        return state

    @torch.no_grad()
    def load_state(self, loaded: dict[str, Tensor]) -> None:
        """Copy loaded factors into the parameters.

        Args:
            loaded: Tensors in the place of those of :meth:`sharded_state`.
        """
        for _, factor, parameter in self.factors():
            if parameter is not None:
                parameter.copy_(loaded[factor.hf[0][0]])

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Enable the dropout of the adapters' inputs inside of this context."""
        adapters = [adapter for _, adapter in self.weights if adapter is not None]
        for adapter in adapters:
            adapter.train()
        try:
            yield
        finally:
            for adapter in adapters:
                adapter.eval()


def add_adapters(
    chunks: Sequence[GPTModel],
    table: Sequence[AdaptedWeight],
    weights: Sequence[LocalWeight],
    dims: ModelDims,
    layout: Layout,
    config: LoraConfig,
    seed: int,
) -> MegatronLora:
    """Freeze a model and add adapters to it. Collective. Call it before the model is wrapped.

    Args:
        chunks: Model chunks of this rank, with loaded weights.
        table: Weights with adapters, at least one.
        weights: All weights of the model, with this rank's parameters.
        config: Rank, scale and dropout.
        seed: Seed of the factor that is not zero.

    Raises:
        ConfigError: The model does not support the adapters, or a model chunk has none. Raised on all ranks.
    """
    _check_supported(chunks, table, config)
    owners = {id(p): (part, name) for chunk in chunks for part, name, p in _direct_parameters(chunk)}
    parameters = dict(weights)
    for chunk in chunks:
        chunk.requires_grad_(False)
        _require_grad_of_embedding(chunk)
    found: list[tuple[AdaptedWeight, Adapter | None]] = []
    for weight in table:
        parameter = parameters[weight.base]
        if parameter is None:
            found.append((weight, None))
            continue
        adapter = adapter_class(weight.base)(weight, dims, config, layout, parameter, seed)
        attach(adapter, *owners[id(parameter)], chunks[0].config)
        found.append((weight, adapter))
    _check_each_chunk_trains(chunks)
    if config.dropout:
        torch.manual_seed(seed + layout.rank)  # each rank has its own dropout
    return MegatronLora(config=config, weights=found)


def _direct_parameters(chunk: GPTModel) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for part in chunk.modules():
        for name, parameter in part.named_parameters(recurse=False):
            yield part, name, parameter


def _require_grad_of_embedding(chunk: GPTModel) -> None:
    """Make recomputed layers have a gradient although no input of the first one needs one.

    Megatron's checkpointed function has no gradient if none of its inputs has one (tensor_parallel/random.py
    ``CheckpointFunction``).
    """
    if chunk.config.recompute_granularity is None or not chunk.pre_process:
        return

    def require_grad(_: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    chunk.embedding.register_forward_hook(require_grad)


def _check_supported(chunks: Sequence[GPTModel], table: Sequence[AdaptedWeight], config: LoraConfig) -> None:
    gates = [weight for weight in table if adapter_class(weight.base) is GateAdapter]
    if config.dropout and gates:
        raise ConfigError(
            f"{LORA}.dropout={config.dropout:g} is not supported for the layer shared_expert_gate",
            remedy=f"set {LORA}.dropout=0, or {LORA}.target_modules without shared_expert_gate",
            keys=(f"{LORA}.dropout", f"{LORA}.target_modules"),
        )
    if chunks[0].config.moe_shared_expert_overlap:
        key = f"{MEGATRON}.override_transformer_config.moe_shared_expert_overlap"
        raise ConfigError(f"{key}=true does not support {LORA}.rank", remedy="remove it", keys=(key, f"{LORA}.rank"))


def _check_each_chunk_trains(chunks: Sequence[GPTModel]) -> None:
    trains = all(any(p.requires_grad for p in chunk.parameters()) for chunk in chunks)
    device = next(chunks[0].parameters()).device
    result = torch.tensor(int(trains), device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MIN)
    if not result.item():
        raise ConfigError(
            f"{LORA}.target_modules: a pipeline stage or an interleaved chunk of layers has no adapter",
            remedy="name layers of each stage, or use fewer stages",
            keys=(
                f"{LORA}.target_modules",
                f"{MEGATRON}.pipeline_model_parallel_size",
                f"{MEGATRON}.virtual_pipeline_model_parallel_size",
            ),
        )
