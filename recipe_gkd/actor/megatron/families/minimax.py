"""MiniMax-M2: mixtures of experts with sigmoid scores, and norms of all query heads and of all key heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipe_gkd.actor.megatron.families.blocks import (
    ALL_HEADS_NORMS,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    experts,
    qkv,
    score_bias,
)
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.families.mistral import MIXTRAL_EXPERTS
from recipe_gkd.actor.megatron.families.routing import single_expert_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_everywhere


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    bias = score_bias("block_sparse_moe.e_score_correction_bias")
    return (INPUT_NORM, *qkv(dims), *ALL_HEADS_NORMS, OUTPUT, MLP_NORM, bias, *experts(*MIXTRAL_EXPERTS))


def _numbers(hf: Any) -> dict[str, Any]:
    moe = experts_everywhere(hf, hf.num_local_experts, normalized=True)
    return {"qk_norm": "all_heads", "moe": replace(moe, score="sigmoid", score_bias=True)}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    numbers=_numbers,
    rules=_rules,
    required={"router_jitter_noise": (0.0,)},
    problem=single_expert_problem,
)
