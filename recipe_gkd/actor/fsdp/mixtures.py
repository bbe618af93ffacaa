"""Experts of mixtures of transformers, as the driver needs them to count FLOPs and the memory of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recipe_gkd.actor.student_dims import LatentAttention, MoEConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_experts(text: PretrainedConfig) -> MoEConfig | None:
    """Return the experts of a family in :data:`MIXTURES`; None for other families and for models without experts."""
    read = MIXTURES.get(text.model_type)
    return None if read is None else read(text)


def read_latent_attention(text: PretrainedConfig) -> LatentAttention | None:
    """Return the widths of latent attention of a family in :data:`LATENT_FAMILIES`; None for other families."""
    if text.model_type not in LATENT_FAMILIES:
        return None
    hf: Any = text
    return LatentAttention(
        q_rank=hf.q_lora_rank,
        kv_rank=hf.kv_lora_rank,
        nope=hf.qk_nope_head_dim,
        rope=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )


def _everywhere(hf: Any) -> MoEConfig:
    """Return experts that all layers have, with the width of a dense layer."""
    return _experts(hf, [True] * hf.num_hidden_layers, hf.num_experts, ffn=hf.intermediate_size)


def _in_some_layers(hf: Any) -> MoEConfig | None:
    """Return experts of the layers that are not dense, and a shared expert with a gate if there is one."""
    layers = [
        layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
        for layer in range(hf.num_hidden_layers)
    ]
    shared = getattr(hf, "shared_expert_intermediate_size", None)
    return _experts(hf, layers, hf.num_experts, shared_ffn=shared) if hf.num_experts and any(layers) else None


def _after_dense_layers(hf: Any) -> MoEConfig:
    """Return experts of the layers after the first dense ones, and shared experts without a gate."""
    kinds = getattr(hf, "mlp_layer_types", None)
    layers = [
        kinds[layer] == "sparse" if kinds else layer >= hf.first_k_dense_replace
        for layer in range(hf.num_hidden_layers)
    ]
    shared = hf.moe_intermediate_size * (hf.n_shared_experts or 0)
    return _experts(hf, layers, hf.n_routed_experts, shared_ffn=shared, shared_gate=False)


def _ernie(hf: Any) -> MoEConfig:
    """Return experts of every ``moe_layer_interval``-th layer within two bounds, and shared experts without a gate."""
    layers = [
        (layer + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= layer <= hf.moe_layer_end_index
        for layer in range(hf.num_hidden_layers)
    ]
    shared = hf.moe_intermediate_size * (hf.moe_num_shared_experts or 0)
    return _experts(hf, layers, hf.num_experts, shared_ffn=shared, shared_gate=False)


def _experts(
    hf: Any,
    layers: list[bool],
    n_experts: int,
    *,
    ffn: int | None = None,
    shared_ffn: int | None = None,
    shared_gate: bool = True,
) -> MoEConfig:
    return MoEConfig(
        layers=tuple(layers),
        experts=n_experts,
        top_k=hf.num_experts_per_tok,
        ffn=ffn or hf.moe_intermediate_size,
        normalized=bool(getattr(hf, "norm_topk_prob", True)),
        shared_ffn=shared_ffn or None,
        shared_gate=shared_gate,
    )


MIXTURES: dict[str, Callable[[Any], MoEConfig | None]] = {
    **dict.fromkeys(("gpt_oss", "minimax_m2", "mixtral", "olmoe"), _everywhere),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _in_some_layers),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"), _after_dense_layers),
    "ernie4_5_moe": _ernie,
}
"""Value of ``model_type`` -> function that reads the experts. All have the matrix products of
:mod:`recipe_gkd.metrics.flops`."""

LATENT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""Values of ``model_type`` with multi-head latent attention."""
