"""Experts of mixtures of transformers, as the driver needs them to count FLOPs and the memory of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recipe_gkd.actor.mixture_configs import (
    experts_and_shared,
    experts_everywhere,
    experts_in_some_layers,
    latent_attention,
)
from recipe_gkd.actor.student_dims import LatentAttention, MoEConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_experts(text: PretrainedConfig) -> MoEConfig | None:
    """Return the experts of a family in :data:`MIXTURES`; None for other families and for models without experts."""
    read = MIXTURES.get(text.model_type)
    return None if read is None else read(text)


def read_latent_attention(text: PretrainedConfig) -> LatentAttention | None:
    """Return the widths of latent attention of a family in :data:`LATENT_FAMILIES`; None for other families."""
    return latent_attention(text) if text.model_type in LATENT_FAMILIES else None


def _everywhere(hf: Any) -> MoEConfig:
    return experts_everywhere(hf, hf.num_experts, normalized=bool(getattr(hf, "norm_topk_prob", True)))


def _in_some_layers(hf: Any) -> MoEConfig | None:
    return experts_in_some_layers(hf, getattr(hf, "shared_expert_intermediate_size", None))


def _after_dense_layers(hf: Any) -> MoEConfig:
    return experts_and_shared(hf, normalized=bool(getattr(hf, "norm_topk_prob", True)))


def _ernie(hf: Any) -> MoEConfig:
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
