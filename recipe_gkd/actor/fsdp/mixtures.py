"""Experts of mixtures of transformers, as the driver needs them to count FLOPs and the memory of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recipe_gkd.actor.mixture_configs import (
    experts_and_shared,
    experts_between_bounds,
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


MIXTURES: dict[str, Callable[[Any], MoEConfig | None]] = {
    **dict.fromkeys(("gpt_oss", "minimax_m2", "mixtral", "olmoe"), _everywhere),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _in_some_layers),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"), _after_dense_layers),
    "ernie4_5_moe": experts_between_bounds,
}
"""Value of ``model_type`` -> function that reads the experts. All have the matrix products of
:mod:`recipe_gkd.metrics.flops`."""

LATENT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""Values of ``model_type`` with multi-head latent attention."""
