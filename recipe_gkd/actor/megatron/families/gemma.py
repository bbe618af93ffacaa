"""Gemma 3, text models: four norms in a layer, two position embeddings, and windows in most layers."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import (
    AFTER_ATTENTION_NORM,
    AFTER_MLP_NORM,
    BEFORE_MLP,
    HEAD_NORMS,
    INPUT_NORM,
    OUTPUT,
    gated_mlp,
    kinds_of_layers,
    qkv,
    replicated,
)
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.model_dims import ModelDims


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    before_mlp = replicated(BEFORE_MLP, "pre_feedforward_layernorm.weight", "hidden")
    attention = (INPUT_NORM, *qkv(dims), *HEAD_NORMS, OUTPUT, AFTER_ATTENTION_NORM)
    return (*attention, before_mlp, *gated_mlp("mlp"), AFTER_MLP_NORM)


def _numbers(hf: Any) -> dict[str, Any]:
    return kinds_of_layers(hf, hf.head_dim) | {
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
        "qk_norm": "head",
        "norms": "both",
        "norm_offset": True,
        "activation": "gelu_tanh",
        "embedding_scale": hf.hidden_size**0.5,
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    numbers=_numbers,
    rules=_rules,
    required={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
)
