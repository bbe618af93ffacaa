"""OLMo 2: norms behind attention and feed-forward block, and norms of all query heads and of all key heads."""

from __future__ import annotations

from recipe_gkd.actor.megatron.families.blocks import (
    AFTER_ATTENTION,
    AFTER_MLP,
    ALL_HEADS_NORMS,
    OUTPUT,
    gated_mlp,
    qkv,
    replicated,
)
from recipe_gkd.actor.megatron.families.family import Family, Rules
from recipe_gkd.actor.megatron.model_dims import ModelDims


def _rules(dims: ModelDims, layer: int) -> Rules:
    after_attention = replicated(AFTER_ATTENTION, "post_attention_layernorm.weight", "hidden")
    after_mlp = replicated(AFTER_MLP, "post_feedforward_layernorm.weight", "hidden")
    return (*qkv(dims), *ALL_HEADS_NORMS, OUTPUT, after_attention, *gated_mlp("mlp"), after_mlp)


OLMO2 = Family(
    model_type="olmo2",
    numbers=lambda hf: {"norms": "after", "qk_norm": "all_heads"},
    rules=_rules,
    required={"attention_bias": (False,)},
)
