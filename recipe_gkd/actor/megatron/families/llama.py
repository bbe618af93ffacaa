"""Llama 2 and 3, and models with the same layers (SmolLM2, DeepSeek-R1-Distill-Llama)."""

from __future__ import annotations

from recipe_gkd.actor.megatron.families.blocks import INPUT_NORM, MLP_NORM, OUTPUT, gated_mlp, qkv
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.model_dims import ModelDims

NO_BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}


def layer_rules(dims: ModelDims, layer: int) -> WeightRules:
    """Return the weights of a layer with norms before attention and feed-forward block."""
    return (INPUT_NORM, *qkv(dims), OUTPUT, MLP_NORM, *gated_mlp("mlp"))


LLAMA = Family(
    model_type="llama",
    numbers=lambda hf: {},
    rules=layer_rules,
    required=NO_BIASES,
    without_effect=frozenset({"pretraining_tp"}),
)
