"""Building blocks of families: weights of usual layers, and numbers that several families read in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe_gkd.actor.megatron.families.family import Part, ShardSpec, WeightRule, WeightRules
from recipe_gkd.actor.megatron.model_dims import LayerAttention, ModelDims, Rope

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")

# ---- weights


def replicated(mcore: str | tuple[str, ...], name: str, shape: str) -> WeightRule:
    """Return the rule of a weight that every rank has."""
    return WeightRule(mcore if isinstance(mcore, tuple) else (mcore,), ShardSpec.NONE, (Part(name, shape),))


BEFORE_ATTENTION = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
BEFORE_MLP = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
AFTER_ATTENTION, AFTER_MLP = "post_attention_layernorm.weight", "post_mlp_layernorm.weight"
INPUT_NORM = replicated(BEFORE_ATTENTION, "input_layernorm.weight", "hidden")
MLP_NORM = replicated(BEFORE_MLP, "post_attention_layernorm.weight", "hidden")
HEAD_NORMS: WeightRules = tuple(
    replicated(f"self_attention.{each}_layernorm.weight", f"self_attn.{each}_norm.weight", "head") for each in "qk"
)
ALL_HEADS_NORMS: WeightRules = tuple(
    WeightRule(
        (f"self_attention.{each}_layernorm.weight",), ShardSpec.ROWS, (Part(f"self_attn.{each}_norm.weight", size),)
    )
    for each, size in (("q", "q"), ("k", "kv"))
)
OUTPUT = WeightRule(
    ("self_attention.linear_proj.weight",), ShardSpec.COLUMNS, (Part("self_attn.o_proj.weight", "hidden q"),)
)


def qkv(dims: ModelDims) -> WeightRules:
    """Return the projections of queries, keys and values, with biases if the model has them."""

    def rule(kind: str, columns: str) -> WeightRule:
        parts = tuple(
            Part(f"self_attn.{name}_proj.{kind}", rows + columns)
            for name, rows in (("q", "q"), ("k", "kv"), ("v", "kv"))
        )
        return WeightRule((f"self_attention.linear_qkv.{kind}",), ShardSpec.QKV, parts)

    return (rule("weight", " hidden"), *([rule("bias", "")] if dims.qkv_bias else []))


def joined_qkv(name: str) -> WeightRule:
    """Return the projections of queries, keys and values that are rows of one tensor."""
    parts = tuple(Part(name, f"{rows} hidden") for rows in ("q", "kv", "kv"))
    return WeightRule(("self_attention.linear_qkv.weight",), ShardSpec.QKV, parts)


def gated_mlp(
    prefix: str, names: tuple[str, str, str] = MLP_NAMES, mcore: tuple[str, ...] = ("mlp.{}.weight",), ffn: str = "ffn"
) -> WeightRules:
    """Return the weights of a gated feed-forward block.

    Args:
        prefix: Prefix of the names of gate, up and down.
        names: Names of gate, up and down. Gate and up are rows of one tensor if their names are equal.
        mcore: Alternative Megatron names; ``{}`` stands for ``linear_fc1`` or ``linear_fc2``.
        ffn: Name of the number of feed-forward columns.
    """
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    of_experts = ffn == "expert_ffn"
    fc1, fc2 = (tuple(name.replace("{}", fc, 1) for name in mcore) for fc in ("linear_fc1", "linear_fc2"))
    return (
        WeightRule(fc1, ShardSpec.GATE_UP, (Part(gate, f"{ffn} hidden"), Part(up, f"{ffn} hidden")), of_experts),
        WeightRule(fc2, ShardSpec.COLUMNS, (Part(down, f"hidden {ffn}"),), of_experts),
    )


def experts(prefix: str = "mlp", names: tuple[str, str, str] = MLP_NAMES) -> WeightRules:
    """Return the router and the experts of a layer."""
    mcore = ("mlp.experts.local_experts.[].{}.weight", "mlp.experts.{}.weight[]")
    of_experts = gated_mlp(f"{prefix}.experts.{{}}", names, mcore, "expert_ffn")
    return (replicated("mlp.router.weight", f"{prefix}.gate.weight", "experts hidden"), *of_experts)


def shared_experts(prefix: str) -> WeightRules:
    """Return the shared experts of a layer."""
    return gated_mlp(prefix, MLP_NAMES, ("mlp.shared_experts.{}.weight",), "shared_ffn")


AFTER_ATTENTION_NORM = replicated(AFTER_ATTENTION, "post_attention_layernorm.weight", "hidden")
AFTER_MLP_NORM = replicated(AFTER_MLP, "post_feedforward_layernorm.weight", "hidden")


def score_bias(name: str, shape: str = "experts") -> WeightRule:
    """Return the correction of the router's scores in the choice of the experts."""
    return WeightRule(("mlp.router.expert_bias",), ShardSpec.NONE, (Part(name, shape),), is_float32=True)


SCORE_BIAS = score_bias("mlp.gate.e_score_correction_bias")


def feed_forward(dims: ModelDims, layer: int, correction: WeightRule = SCORE_BIAS) -> WeightRules:
    """Return a dense feed-forward block, or the router with its correction, and the shared and routed experts."""
    moe = dims.moe
    if moe is None or not moe.layers[layer]:
        return gated_mlp("mlp")
    router, *of_experts = experts()
    bias = (correction,) if moe.score_bias else ()
    shared = shared_experts("mlp.shared_experts") if moe.shared_ffn else ()
    return (router, *bias, *shared, *of_experts)


def is_sparse(dims: ModelDims, layer: int) -> bool:
    """Return True for a mixture-of-experts layer."""
    return dims.moe is not None and dims.moe.layers[layer]


# ---- numbers


def rope(hf: Any, parameters: Mapping[str, Any], head_dim: int, *, interleaved: bool = False) -> Rope:
    """Return a position embedding.

    Args:
        hf: Configuration of transformers.
        parameters: Its ``rope_parameters``, or those of a kind of layer.
        head_dim: Width of a head.
        interleaved: If true, neighboring channels form a pair.
    """
    is_scaled = parameters.get("rope_type", "default") != "default"
    return Rope(
        width=int(head_dim * (parameters.get("partial_rotary_factor") or 1.0)),
        theta=float(parameters["rope_theta"]),
        scaling=dict(parameters) if is_scaled else {},
        max_positions=hf.max_position_embeddings,
        interleaved=interleaved,
    )


def windows(n_layers: int, window: int | None) -> tuple[LayerAttention, ...]:
    """Return the attention of layers that all have a window, or none."""
    return (LayerAttention(window=window),) * n_layers if window else ()


def kinds_of_layers(hf: Any, head_dim: int) -> dict[str, Any]:
    """Return position embeddings and attention of layers of two kinds, each with its own ``rope_parameters``."""
    layers = {"full_attention": LayerAttention(0), "sliding_attention": LayerAttention(1, hf.sliding_window)}
    return {
        "ropes": tuple(rope(hf, hf.rope_parameters[kind], head_dim) for kind in layers),
        "attention": tuple(layers[kind] for kind in hf.layer_types),
    }
