"""ERNIE 4.5: Llama's layers, in which neighboring channels are rotated as a pair, and mixtures of experts."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import INPUT_NORM, MLP_NORM, OUTPUT, feed_forward, qkv, rope, score_bias
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.families.llama import layer_rules
from recipe_gkd.actor.megatron.families.routing import single_expert_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_between_bounds

WITHOUT_BIAS = {"use_bias": (False,)}


def _numbers(hf: Any) -> dict[str, Any]:
    return {"ropes": (rope(hf, hf.rope_parameters, hf.head_dim, interleaved=True),)}


def _moe_numbers(hf: Any) -> dict[str, Any]:
    head_dim = hf.hidden_size // hf.num_attention_heads
    return {
        "ropes": (rope(hf, hf.rope_parameters, head_dim, interleaved=True),),
        "moe": experts_between_bounds(hf, score_bias=True),
    }


def _moe_rules(dims: ModelDims, layer: int) -> WeightRules:
    correction = score_bias("mlp.moe_statics.e_score_correction_bias", "1 experts")
    return (INPUT_NORM, *qkv(dims), OUTPUT, MLP_NORM, *feed_forward(dims, layer, correction))


ERNIE4_5 = Family(model_type="ernie4_5", numbers=_numbers, rules=layer_rules, required=WITHOUT_BIAS)
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    numbers=_moe_numbers,
    rules=_moe_rules,
    required=WITHOUT_BIAS,
    problem=single_expert_problem,
    without_effect=frozenset({"moe_norm_min"}),
)
