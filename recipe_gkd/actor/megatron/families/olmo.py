"""OLMo 2, OLMo 3 and OLMoE: norms of all query heads and of all key heads.

The dense models have norms behind attention and feed-forward block instead of before them.
"""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import (
    AFTER_ATTENTION_NORM,
    AFTER_MLP_NORM,
    ALL_HEADS_NORMS,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    feed_forward,
    gated_mlp,
    kinds_of_layers,
    qkv,
)
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.families.routing import single_expert_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_everywhere

NORMS = {"norms": "after", "qk_norm": "all_heads"}
WITHOUT_BIAS = {"attention_bias": (False,)}


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    return (*qkv(dims), *ALL_HEADS_NORMS, OUTPUT, AFTER_ATTENTION_NORM, *gated_mlp("mlp"), AFTER_MLP_NORM)


def _olmoe_rules(dims: ModelDims, layer: int) -> WeightRules:
    return (INPUT_NORM, *qkv(dims), *ALL_HEADS_NORMS, OUTPUT, MLP_NORM, *feed_forward(dims, layer))


def _olmoe(hf: Any) -> dict[str, Any]:
    moe = experts_everywhere(hf, hf.num_experts, normalized=hf.norm_topk_prob)
    return {"qk_norm": "all_heads", "moe": moe}


OLMO2 = Family(model_type="olmo2", numbers=lambda hf: dict(NORMS), rules=_rules, required=WITHOUT_BIAS)
OLMO3 = Family(
    model_type="olmo3",
    numbers=lambda hf: kinds_of_layers(hf, hf.hidden_size // hf.num_attention_heads) | NORMS,
    rules=_rules,
    required=WITHOUT_BIAS,
)
OLMOE = Family(
    model_type="olmoe",
    numbers=_olmoe,
    rules=_olmoe_rules,
    required=WITHOUT_BIAS | {"clip_qkv": (None,)},
    problem=single_expert_problem,
)
