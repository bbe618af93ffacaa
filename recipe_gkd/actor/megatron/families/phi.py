"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with joined projections."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import INPUT_NORM, MLP_NORM, OUTPUT, gated_mlp, joined_qkv, windows
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.model_dims import ModelDims

JOINED_GATE_UP = ("gate_up_proj", "gate_up_proj", "down_proj")


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    return (INPUT_NORM, joined_qkv("self_attn.qkv_proj.weight"), OUTPUT, MLP_NORM, *gated_mlp("mlp", JOINED_GATE_UP))


def _numbers(hf: Any) -> dict[str, Any]:
    return {"attention": windows(hf.num_hidden_layers, hf.sliding_window)}


PHI3 = Family(
    model_type="phi3",
    numbers=_numbers,
    rules=_rules,
    required={"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
    without_effect=frozenset({"original_max_position_embeddings"}),
)
