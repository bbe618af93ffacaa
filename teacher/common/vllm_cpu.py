"""Corrections of vLLM's CPU build, which computes other log-probabilities than transformers for some models.

Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@cache
def correct_cpu_build() -> None:
    """Replace the functions of vLLM that are wrong on a CPU. Call it in each rank, before it builds the model.

    On other devices, and in further calls in a process, it has no effect.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _route_by_corrected_scores()
        _rotate_all_heads()


def exact_attention(model_config: Any) -> str | None:
    """Return the name of the attention backend for a CPU; None for vLLM's choice.

    On a CPU with AMX tiles, vLLM computes latent attention with them, in bfloat16, for any data type of the model
    (``CpuPlatform.get_attn_backend_cls``).

    Args:
        model_config: vLLM's configuration of the model.
    """
    import torch

    return "CPU_MLA" if model_config.use_mla and model_config.dtype == torch.float32 else None


def _route_by_corrected_scores() -> None:
    """Let routers without groups of experts use scores other than the softmax, and corrections of the scores.

    ``fused_moe/router/cpu_router.py`` ignores the corrections, which ERNIE 4.5 has, and refuses the sigmoid scores of
    MiniMax-M2. All experts in one group are the same choice.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    original: Any = CPURouter._compute_routing

    def compute(self: Any, *args: Any, **options: Any) -> Any:
        is_corrected = self.scoring_func == "sigmoid" or self.e_score_correction_bias is not None
        is_plain = not self.use_grouped_topk and self.custom_routing_function is None
        if is_plain and is_corrected and self.scoring_func in ("softmax", "sigmoid"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return original(self, *args, **options)

    CPURouter._compute_routing = compute  # type: ignore[method-assign]


def _rotate_all_heads() -> None:
    """Rotate all heads if they are a separate dimension, as in latent attention and in LFM2.

    The kernel takes the last dimension for all heads of a token (``csrc/cpu/pos_encoding.cpp``).
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original: Any = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        if query.dim() != 3:
            return original(self, positions, query, key)
        rows = [None if heads is None else heads.reshape(len(heads), -1).contiguous() for heads in (query, key)]
        rotated = original(self, positions, *rows)
        return tuple(
            None if heads is None else new.view(heads.shape) for heads, new in zip((query, key), rotated, strict=True)
        )

    RotaryEmbedding.forward_cpu = rotate  # type: ignore[method-assign]
