"""Seed-OSS: Llama's layers with biases of queries, keys and values."""

from __future__ import annotations

from recipe_gkd.actor.megatron.families.family import Family
from recipe_gkd.actor.megatron.families.llama import layer_rules

SEED_OSS = Family(
    model_type="seed_oss",
    numbers=lambda hf: {"qkv_bias": hf.attention_bias},
    rules=layer_rules,
    required={"attention_out_bias": (False,), "mlp_bias": (False,)},
    # Released models have dropout rates of 0.1 here. They do not apply to a student in evaluation mode.
    without_effect=frozenset({"pretraining_tp", "residual_dropout", "attention_dropout"}),
)
