"""gpt-oss: mixtures of experts with biases, attention sinks and sliding windows in every other layer.

A layer's experts are one tensor of the folder for each of their weights, with matrices [in, out].
"""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.megatron.families.blocks import INPUT_NORM, MLP_NORM, OUTPUT, qkv, replicated
from recipe_gkd.actor.megatron.families.family import Family, Part, ShardSpec, Stack, WeightRule, WeightRules
from recipe_gkd.actor.megatron.families.routing import Problem, single_expert_problem
from recipe_gkd.actor.megatron.model_dims import LayerAttention, ModelDims
from recipe_gkd.actor.mixture_configs import experts_everywhere


def _stacked(mcore: str, name: str, shape: str, *, interleaved: bool = False) -> WeightRule:
    return WeightRule(
        (f"mlp.experts.local_experts.[].{mcore}",),
        ShardSpec.NONE,
        (Part(f"mlp.experts.{name}", shape),),
        of_experts=True,
        stack=Stack(transposed=" " in shape, interleaved=interleaved),
    )


_ATTENTION = (
    OUTPUT,
    replicated("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "hidden"),
    WeightRule(("self_attention.core_attention.softmax_offset",), ShardSpec.ROWS, (Part("self_attn.sinks", "heads"),)),
)
_EXPERTS = (
    replicated("mlp.router.weight", "mlp.router.weight", "experts hidden"),
    replicated("mlp.router.bias", "mlp.router.bias", "experts"),
    _stacked("linear_fc1.weight", "gate_up_proj", "hidden gate+up", interleaved=True),
    _stacked("linear_fc1.bias", "gate_up_proj_bias", "gate+up", interleaved=True),
    _stacked("linear_fc2.weight", "down_proj", "expert_ffn hidden"),
    _stacked("linear_fc2.bias", "down_proj_bias", "hidden"),
)


def _rules(dims: ModelDims, layer: int) -> WeightRules:
    return (INPUT_NORM, *qkv(dims), *_ATTENTION, MLP_NORM, *_EXPERTS)


def _numbers(hf: Any) -> dict[str, Any]:
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    return {
        "attention": tuple(LayerAttention(window=windows[kind]) for kind in hf.layer_types),
        "qkv_bias": True,
        "linear_bias": True,
        "sinks": True,
        "activation": "quick_gelu",
        "gate_limit": float(hf.swiglu_limit),
        "up_offset": 1.0,
        "moe": experts_everywhere(hf, hf.num_local_experts, normalized=True),
    }


def _problem(hf: Any) -> Problem | None:
    """Return why vLLM, which has a window in every other layer, would compute another model."""
    kinds = ("sliding_attention", "full_attention")
    if any(kind != kinds[layer % 2] for layer, kind in enumerate(hf.layer_types)):
        return "vLLM has a sliding window in the first and then in every other layer", ("layer_types",)
    return single_expert_problem(hf)


GPT_OSS = Family(
    model_type="gpt_oss",
    numbers=_numbers,
    rules=_rules,
    required={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    problem=_problem,
)
