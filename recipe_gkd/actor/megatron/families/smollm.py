"""SmolLM3: Llama's layers, of which some have no position embedding."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.family import Family
from recipe_gkd.actor.megatron.families.llama import NO_BIASES, layer_rules
from recipe_gkd.actor.megatron.families.qwen import OF_WINDOWS, WITHOUT_WINDOW
from recipe_gkd.actor.megatron.model_dims import LayerAttention


def _numbers(hf: Any) -> dict[str, Any]:
    return {"attention": tuple(LayerAttention(rope=0 if has_rope else None) for has_rope in hf.no_rope_layers)}


SMOLLM3 = Family(
    model_type="smollm3",
    numbers=_numbers,
    rules=layer_rules,
    required=NO_BIASES | WITHOUT_WINDOW,
    without_effect=OF_WINDOWS | {"no_rope_layer_interval"},
)
