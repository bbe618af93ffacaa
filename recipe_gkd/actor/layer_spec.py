"""What a transformer layer is made of: Transformer Engine's modules where they are installed, torch's own elsewhere.

Megatron's stock "local" spec lacks what is needed here: its norm refuses sequence parallelism and ignores
``params_dtype``, and its attention builds an s x s score matrix and does not take packed sequences.
Axis names: N tokens of a packed row, H heads, G key/value groups, D head width.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec that GPTModel takes, for the layers of this pipeline stage (and virtual stage)."""
    if has_transformer_engine():
        if config.num_moe_experts is None:
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    # A block spec, not a layer spec: TransformerBlock would choose its own final norm.
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # finalize_model_grads


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


@dataclass
class PackedSequences(PackedSeqParams):
    """Where the sequences of a packed row lie, for Transformer Engine and Megatron's rotary embedding, and for us."""

    blocks: list[Tensor] = field(default_factory=list)
    """int64 [B, S] each: row numbers of B sequences of similar length; any row where one is shorter than S."""
    unpack_index_N: Tensor | None = None
    """int64: where each row is in the blocks, flattened and one after the other."""


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence of a packed row; grouped queries, no dropout, no context parallelism."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """``query`` [N, H, D], ``key`` and ``value`` [N, G, D] -> [N, H * D]."""
        outputs = []
        for rows_BS in packed_seq_params.blocks:
            q, k, v = (x[rows_BS].transpose(1, 2) for x in (query, key, value))  # [B, heads, S, D]
            # Padding is on the right and attention is causal: no real position sees it.
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[packed_seq_params.unpack_index_N].flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}
