"""DeepSeek-V2, DeepSeek-V3 (also Moonlight) and GLM-4.7-Flash: multi-head latent attention and shared experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from recipe_gkd.actor.megatron.families.blocks import MLP_NORM, feed_forward, replicated, rope
from recipe_gkd.actor.megatron.families.family import Family, Part, ShardSpec, WeightRule, WeightRules
from recipe_gkd.actor.megatron.families.routing import expert_groups, sigmoid_problem, softmax_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_and_shared, latent_attention

INPUT_NORM = replicated("input_layernorm.weight", "input_layernorm.weight", "hidden")


def _rows(mcore: str, name: str, shape: str) -> WeightRule:
    return WeightRule((f"self_attention.{mcore}.weight",), ShardSpec.ROWS, (Part(f"self_attn.{name}.weight", shape),))


def _latent_attention(dims: ModelDims) -> WeightRules:
    queries: WeightRules = (_rows("linear_q_proj", "q_proj", "q hidden"),)
    if dims.latent and dims.latent.q_rank:
        queries = (
            replicated("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "q_rank hidden"),
            replicated("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", "q_rank"),
            _rows("linear_q_up_proj", "q_b_proj", "q q_rank"),
        )
    return (
        *queries,
        replicated(
            "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "kv_rank+rope hidden"
        ),
        replicated("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "kv_rank"),
        _rows("linear_kv_up_proj", "kv_b_proj", "k+v kv_rank"),
        WeightRule(
            ("self_attention.linear_proj.weight",), ShardSpec.COLUMNS, (Part("self_attn.o_proj.weight", "hidden v"),)
        ),
    )


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    return (INPUT_NORM, *_latent_attention(dims), MLP_NORM, *feed_forward(dims, layer))


def _attention(hf: Any) -> dict[str, Any]:
    latent = latent_attention(hf)
    parameters = hf.rope_parameters
    scale = latent.query**-0.5
    # DeepSeek's YaRN scales the scores, not cosines and sines (`yarn_apply_mscale` of transformers).
    if (weight := parameters.get("mscale_all_dim")) and parameters["factor"] > 1:
        scale *= (0.1 * weight * math.log(parameters["factor"]) + 1) ** 2
    return {
        "kv_heads": 0,
        "head_dim": 0,
        "latent": latent,
        "ropes": (rope(hf, parameters, latent.rope, interleaved=True),),
        "softmax_scale": scale,
    }


def _deepseek_v2(hf: Any) -> dict[str, Any]:
    groups = None if hf.topk_method == "greedy" else expert_groups(hf)
    return _attention(hf) | {"moe": experts_and_shared(hf, normalized=False, groups=groups)}


def _deepseek_v3(hf: Any) -> dict[str, Any]:
    moe = experts_and_shared(hf, normalized=True, score="sigmoid", score_bias=True, groups=expert_groups(hf))
    return _attention(hf) | {"moe": moe}


WITHOUT_EFFECT = frozenset({"num_key_value_heads", "pretraining_tp", "num_mtp_layers", "head_dim"})
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    numbers=_deepseek_v2,
    rules=_rules,
    required={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
    },
    problem=softmax_problem,
    without_effect=WITHOUT_EFFECT,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    numbers=_deepseek_v3,
    rules=_rules,
    required={"attention_bias": (False,), "norm_topk_prob": (True,), "rope_interleave": (True,)},
    problem=sigmoid_problem,
    without_effect=WITHOUT_EFFECT,
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite")
