"""GLM-4 (dense, with norms before and behind each block) and GLM-4.5 (mixtures of experts)."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import (
    AFTER_ATTENTION,
    AFTER_MLP,
    HEAD_NORMS,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    feed_forward,
    gated_mlp,
    qkv,
    replicated,
    rope,
)
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.families.phi import JOINED_GATE_UP
from recipe_gkd.actor.megatron.families.routing import expert_groups, sigmoid_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_and_shared


def _glm4_rules(dims: ModelDims, layer: int) -> WeightRules:
    after_attention = replicated(AFTER_ATTENTION, "post_self_attn_layernorm.weight", "hidden")
    after_mlp = replicated(AFTER_MLP, "post_mlp_layernorm.weight", "hidden")
    return (
        INPUT_NORM, *qkv(dims), OUTPUT, after_attention, MLP_NORM, *gated_mlp("mlp", JOINED_GATE_UP), after_mlp,
    )  # fmt: skip


def _glm4_moe_rules(dims: ModelDims, layer: int) -> WeightRules:
    norms = HEAD_NORMS if dims.qk_norm else ()
    return (INPUT_NORM, *qkv(dims), *norms, OUTPUT, MLP_NORM, *feed_forward(dims, layer))


def _glm4(hf: Any) -> dict[str, Any]:
    return {
        "ropes": (rope(hf, hf.rope_parameters, hf.head_dim, interleaved=True),),
        "qkv_bias": hf.attention_bias,
        "norms": "both",
    }


def _glm4_moe(hf: Any) -> dict[str, Any]:
    moe = experts_and_shared(hf, normalized=True, score="sigmoid", score_bias=True, groups=expert_groups(hf))
    return {"qkv_bias": hf.attention_bias, "qk_norm": "head" if hf.use_qk_norm else None, "moe": moe}


GLM4 = Family(model_type="glm4", numbers=_glm4, rules=_glm4_rules)
GLM4_MOE = Family(
    model_type="glm4_moe",
    numbers=_glm4_moe,
    rules=_glm4_moe_rules,
    required={"norm_topk_prob": (True,)},
    problem=sigmoid_problem,
    without_effect=frozenset({"num_mtp_layers"}),
)
