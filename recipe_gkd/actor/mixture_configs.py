"""Experts and latent attention in the configurations of transformers, for both training backends."""

from __future__ import annotations

from typing import Any

from recipe_gkd.actor.student_dims import LatentAttention, MoEConfig


def experts_everywhere(hf: Any, n_experts: int, *, normalized: bool) -> MoEConfig:
    """Return the experts of a model that has them in all layers, and no shared ones."""
    return MoEConfig(
        layers=(True,) * hf.num_hidden_layers,
        experts=n_experts,
        top_k=hf.num_experts_per_tok,
        ffn=hf.intermediate_size,
        normalized=normalized,
        shared_ffn=None,
    )


def experts_in_some_layers(hf: Any, shared_ffn: int | None) -> MoEConfig | None:
    """Return the experts of a model that has them in every ``decoder_sparse_step``-th layer; None if in none.

    Args:
        hf: Configuration of transformers.
        shared_ffn: Width of a shared expert; None without one.
    """
    layers = tuple(
        layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
        for layer in range(hf.num_hidden_layers)
    )
    if not hf.num_experts or not any(layers):
        return None
    return MoEConfig(
        layers=layers,
        experts=hf.num_experts,
        top_k=hf.num_experts_per_tok,
        ffn=hf.moe_intermediate_size,
        normalized=hf.norm_topk_prob,
        shared_ffn=shared_ffn,
    )


def latent_attention(hf: Any) -> LatentAttention:
    """Return the widths of multi-head latent attention."""
    return LatentAttention(
        q_rank=hf.q_lora_rank,
        kv_rank=hf.kv_lora_rank,
        nope=hf.qk_nope_head_dim,
        rope=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )


def experts_and_shared(hf: Any, **router: Any) -> MoEConfig:
    """Return the experts of a model whose other layers are dense, and which has shared experts without a gate.

    Args:
        hf: Configuration of transformers.
        router: Options of the router.
    """
    shared = hf.n_shared_experts or 0
    kinds = getattr(hf, "mlp_layer_types", None)
    first = 0 if kinds else hf.first_k_dense_replace
    return MoEConfig(
        layers=tuple(kinds[layer] == "sparse" if kinds else layer >= first for layer in range(hf.num_hidden_layers)),
        experts=hf.n_routed_experts,
        top_k=hf.num_experts_per_tok,
        ffn=hf.moe_intermediate_size,
        shared_ffn=hf.moe_intermediate_size * shared or None,
        shared_gate=False,
        scale=float(hf.routed_scaling_factor),
        **router,
    )


def experts_between_bounds(hf: Any, *, score_bias: bool = False) -> MoEConfig:
    """Return experts of every ``moe_layer_interval``-th layer within two bounds, and shared experts without a gate."""
    return MoEConfig(
        layers=tuple(
            (layer + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= layer <= hf.moe_layer_end_index
            for layer in range(hf.num_hidden_layers)
        ),
        experts=hf.num_experts,
        top_k=hf.num_experts_per_tok,
        ffn=hf.moe_intermediate_size,
        normalized=True,
        shared_ffn=hf.moe_intermediate_size * (hf.moe_num_shared_experts or 0) or None,
        shared_gate=False,
        score_bias=score_bias,
    )
