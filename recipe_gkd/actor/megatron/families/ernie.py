"""ERNIE 4.5, dense: Llama's layers, in which neighboring channels are rotated as a pair."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import rope
from recipe_gkd.actor.megatron.families.family import Family
from recipe_gkd.actor.megatron.families.llama import layer_rules


def _numbers(hf: Any) -> dict[str, Any]:
    return {"ropes": (rope(hf, hf.rope_parameters, hf.head_dim, interleaved=True),)}


ERNIE4_5 = Family(model_type="ernie4_5", numbers=_numbers, rules=layer_rules, required={"use_bias": (False,)})
