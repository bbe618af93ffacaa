"""Qwen2, Qwen2.5 and Qwen3, dense and with mixtures of experts."""

from __future__ import annotations

from recipe_gkd.actor.megatron.families.blocks import (
    HEAD_NORMS,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    experts,
    feed_forward,
    is_sparse,
    qkv,
    replicated,
    shared_experts,
)
from recipe_gkd.actor.megatron.families.family import Family, WeightRules
from recipe_gkd.actor.megatron.families.llama import layer_rules
from recipe_gkd.actor.megatron.families.routing import single_expert_problem
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.mixture_configs import experts_in_some_layers

WITHOUT_WINDOW = {"use_sliding_window": (False,)}
OF_WINDOWS = frozenset({"sliding_window", "max_window_layers", "layer_types"})
"""Fields that have no effect without ``use_sliding_window``."""
SHARED_GATE = replicated("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "1 hidden")


def _qwen3_rules(dims: ModelDims, layer: int) -> WeightRules:
    return (INPUT_NORM, *qkv(dims), *HEAD_NORMS, OUTPUT, MLP_NORM, *feed_forward(dims, layer))


def _qwen2_moe_rules(dims: ModelDims, layer: int) -> WeightRules:
    if not is_sparse(dims, layer):
        return layer_rules(dims, layer)
    router, *of_experts = experts()
    shared = shared_experts("mlp.shared_expert")
    return (INPUT_NORM, *qkv(dims), OUTPUT, MLP_NORM, router, SHARED_GATE, *shared, *of_experts)


QWEN2 = Family(
    model_type="qwen2",
    numbers=lambda hf: {"qkv_bias": True},
    rules=layer_rules,
    required=WITHOUT_WINDOW,
    without_effect=OF_WINDOWS,
)
QWEN3 = Family(
    model_type="qwen3",
    numbers=lambda hf: {"qk_norm": "head"},
    rules=_qwen3_rules,
    required=WITHOUT_WINDOW | {"attention_bias": (False,)},
    without_effect=OF_WINDOWS,
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    numbers=lambda hf: {"qkv_bias": hf.qkv_bias, "moe": experts_in_some_layers(hf, hf.shared_expert_intermediate_size)},
    rules=_qwen2_moe_rules,
    required=WITHOUT_WINDOW,
    problem=single_expert_problem,
    without_effect=OF_WINDOWS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    numbers=lambda hf: {"qk_norm": "head", "moe": experts_in_some_layers(hf, None)},
    rules=_qwen3_rules,
    required=WITHOUT_WINDOW | {"attention_bias": (False,)},
    problem=single_expert_problem,
    without_effect=OF_WINDOWS,
)
