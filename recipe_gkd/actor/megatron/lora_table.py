"""Table of the adapters of a model: which weights have one, and the shapes and the sharding of its factors.

A Hugging Face layer with an adapter is a part of one Megatron weight. This module imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipe_gkd.actor.lora import factor_name, select_layers
from recipe_gkd.actor.megatron.families.family import ShardSpec
from recipe_gkd.actor.megatron.hf_names import TensorRows, Weight, weights
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.config.schema import LoraConfig

SHARED_EXPERT_GATE = "mlp.shared_experts.gate_weight"
_LINEAR = (ShardSpec.QKV, ShardSpec.GATE_UP, ShardSpec.COLUMNS, ShardSpec.ROWS)
_REPLICATED = tuple(f"self_attention.linear_{name}_down_proj.weight" for name in ("q", "kv"))
"""Linear layers of latent attention that are not divided."""


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of the model in which at least one Hugging Face layer has an adapter.

    Attributes:
        base: Weight of the model.
        layers: Names of its layers with an adapter, by their index in ``base.hf``.
        factors: Factors A and B of each of these layers, in order, as weights of the model. The factor whose dimension
            tensor parallelism divides in ``base`` is divided, the other one is replicated.
    """

    base: Weight
    layers: Mapping[int, str]
    factors: tuple[tuple[Weight, Weight], ...]


def adapted_weights(dims: ModelDims, config: LoraConfig) -> list[AdaptedWeight]:
    """Return the weights with adapters in the order of the forward pass; none without a rank.

    Adapters are possible on all linear layers of transformers except the output layer. The router and the experts of a
    mixture are no linear layers there, as with ``strategy=fsdp``.

    Raises:
        ConfigError: ``config.target_modules`` has a name that no linear layer of the model has.
    """
    if not config.rank:
        return []
    linear = {weight: [_layer_of(name) for name, _ in weight.hf] for weight in weights(dims) if _is_linear(weight)}
    names = [name for layers in linear.values() for name in layers]
    selected = set(select_layers(names, config.target_modules, f"a {dims.family} model"))
    found = []
    for weight, layers in linear.items():
        if chosen := {index: name for index, name in enumerate(layers) if name in selected}:
            factors = tuple(_factors(weight, index, name, config.rank) for index, name in chosen.items())
            found.append(AdaptedWeight(weight, chosen, factors))
    return found


def _is_linear(weight: Weight) -> bool:
    if weight.layer is None or weight.expert is not None or len(weight.hf[0][1]) != 2:
        return False
    return weight.shard_spec in _LINEAR or weight.mcore[0] in (SHARED_EXPERT_GATE, *_REPLICATED)


def _layer_of(name: str) -> str:
    return name.removesuffix(".weight")


def _factors(weight: Weight, index: int, layer: str, rank: int) -> tuple[Weight, Weight]:
    name, (_, n_inputs) = weight.hf[index]
    specs = {
        ShardSpec.COLUMNS: (ShardSpec.COLUMNS, ShardSpec.NONE),
        ShardSpec.NONE: (ShardSpec.NONE, ShardSpec.NONE),
    }
    # The rows of a layer that joins several projections are in the order of Megatron's parameter, those of a projection
    # in their own.
    rows = [part for part in weight.parts if part.name == name]
    spec_a, spec_b = specs.get(weight.shard_spec, (ShardSpec.NONE, weight.shard_spec if rows[1:] else ShardSpec.ROWS))
    return (
        _factor(factor_name(layer, "A"), [(rank, n_inputs)], spec_a, weight.layer),
        _factor(factor_name(layer, "B"), [(part.shape[0], rank) for part in rows], spec_b, weight.layer),
    )


def _factor(name: str, shapes: list[tuple[int, int]], spec: ShardSpec, layer: int | None) -> Weight:
    """Return a factor, whose rows are in consecutive parts."""
    n_rows = [rows for rows, _ in shapes]
    parts = tuple(TensorRows(name, sum(n_rows[:index]), shape) for index, shape in enumerate(shapes))
    return Weight(((name, (sum(n_rows), shapes[0][1])),), (), spec, layer, parts=parts)
