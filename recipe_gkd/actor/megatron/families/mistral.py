"""Mistral and Mixtral."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import INPUT_NORM, MLP_NORM, OUTPUT, experts, qkv, windows
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.families.llama import layer_rules
from recipe_gkd.actor.megatron.families.routing import single_expert_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_everywhere

MIXTRAL_EXPERTS = ("block_sparse_moe", ("w1", "w3", "w2"))
"""Prefix of the names of the experts, and the names of gate, up and down."""


def _mixtral_rules(dims: ModelDims, layer: int) -> WeightRules:
    return (INPUT_NORM, *qkv(dims), OUTPUT, MLP_NORM, *experts(*MIXTRAL_EXPERTS))


def _windowed(hf: Any) -> dict[str, Any]:
    return {"attention": windows(hf.num_hidden_layers, hf.sliding_window)}


def _mixtral(hf: Any) -> dict[str, Any]:
    return _windowed(hf) | {"moe": experts_everywhere(hf, hf.num_local_experts, normalized=True)}


MISTRAL = Family(model_type="mistral", numbers=_windowed, rules=layer_rules)
MIXTRAL = Family(
    model_type="mixtral",
    numbers=_mixtral,
    rules=_mixtral_rules,
    required={"router_jitter_noise": (0.0,)},
    problem=single_expert_problem,
)
