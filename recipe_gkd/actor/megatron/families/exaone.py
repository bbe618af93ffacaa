"""EXAONE 4.0: norms behind each block; in models with windows, the layers without one have no position embedding."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import (
    AFTER_ATTENTION_NORM,
    AFTER_MLP_NORM,
    HEAD_NORMS,
    OUTPUT,
    gated_mlp,
    qkv,
)
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.model_dims import LayerAttention, ModelDims


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    return (*qkv(dims), *HEAD_NORMS, OUTPUT, AFTER_ATTENTION_NORM, *gated_mlp("mlp"), AFTER_MLP_NORM)


def _numbers(hf: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {"norms": "after", "qk_norm": "head"}
    if hf.sliding_window:
        layers = {"sliding_attention": LayerAttention(0, hf.sliding_window), "full_attention": LayerAttention(None)}
        numbers["attention"] = tuple(layers[kind] for kind in hf.layer_types)
    return numbers


EXAONE4 = Family(
    model_type="exaone4", numbers=_numbers, rules=_rules, without_effect=frozenset({"sliding_window_pattern"})
)
