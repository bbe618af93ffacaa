"""Choice of the kernel that computes attention within the sequences of a packed row.

Only ``STORED_SCORES`` stores scores, [S, S] for each head and sequence, and those of some queries at a time.
"""

from __future__ import annotations

from enum import Enum

import torch

Capability = tuple[int, int]


class AttentionKernel(Enum):
    """Kernel for packed rows. The value is its description in the log."""

    TE_FUSED = "Transformer Engine, cuDNN for packed sequences (THD)"
    VARLEN = "torch varlen_attn (FlashAttention)"
    SDPA_BLOCKS = "torch scaled_dot_product_attention in blocks"
    STORED_SCORES = "torch matrix products, with the stored scores of some queries at a time"

    @property
    def reads_blocks(self) -> bool:
        """True if the kernel computes blocks of sequences, whose indices it reads."""
        return self in (AttentionKernel.SDPA_BLOCKS, AttentionKernel.STORED_SCORES)


def choose_attention(
    *, with_transformer_engine: bool, capability: Capability | None, dtype: torch.dtype, head_dim: int
) -> AttentionKernel:
    """Return the fastest kernel that supports a GPU and a model.

    The package ``flash-attn`` is not considered. ``varlen_attn`` has the same kernels and is part of torch, while
    Transformer Engine ignores versions of ``flash-attn`` that it was not tested with, and then stores the scores.

    Args:
        with_transformer_engine: True if the layers are Transformer Engine's.
        capability: Compute capability of the GPU; None for a CPU.
        dtype: Data type of queries, keys and values.
        head_dim: Width of one head.
    """
    if capability is None:
        return AttentionKernel.SDPA_BLOCKS
    if with_transformer_engine and supports_te_fused(capability, dtype, head_dim):
        return AttentionKernel.TE_FUSED
    return AttentionKernel.VARLEN if supports_varlen(capability, dtype, head_dim) else AttentionKernel.SDPA_BLOCKS


def supports_te_fused(capability: Capability, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if cuDNN's fused attention trains on packed sequences in Transformer Engine 2.9 to 2.18.

    The conditions come from ``nvte_get_fused_attn_backend`` (common/fused_attn/fused_attn.cpp) and of
    ``get_attention_backend`` (pytorch/attention/dot_product_attention/utils.py). Elsewhere Transformer Engine would
    store the scores of all heads, [S, S] for each sequence.
    """
    is_hopper_or_blackwell = capability[0] in (9, 10)  # not compute capability 12, which utils.py excludes
    widest = 256 if capability == (9, 0) else 128
    return _is_16_bit(dtype) and is_hopper_or_blackwell and head_dim % 8 == 0 and head_dim <= widest


def supports_varlen(capability: Capability, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if ``torch.nn.attention.varlen`` trains with this type and head width.

    The conditions come from ``mha_varlen_fwd`` and ``mha_varlen_bwd`` in torch's
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    widest = 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192
    return _is_16_bit(dtype) and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= widest


def _is_16_bit(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)
