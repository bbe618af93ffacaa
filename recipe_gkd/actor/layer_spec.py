"""Modules of a transformer layer: those of Transformer Engine if it is installed, torch's own modules otherwise.

Megatron's "local" spec is not sufficient: its norm rejects sequence parallelism and ignores ``params_dtype``, and its
attention allocates an S x S score matrix and does not support packed sequences.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width, R sequences of a block, S
length of a block.
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
    """Return True if Transformer Engine is installed and CUDA is available."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec for GPTModel of the layers of this pipeline stage.

    Args:
        config: Megatron's configuration.
        vp_stage: Virtual pipeline stage; None without interleaving.
    """
    if has_transformer_engine():
        if config.num_moe_experts is None:
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    # With a layer spec, TransformerBlock would choose its own final norm, so a block spec is used.
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
    """RMSNorm with Megatron's constructor, in ``params_dtype``, that supports sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by finalize_model_grads


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


@dataclass
class PackedSequences(PackedSeqParams):
    """Positions of the sequences in a packed row.

    The inherited fields are read by Transformer Engine and by Megatron's rotary embedding, the new fields by
    :class:`PackedAttention`.

    Attributes:
        blocks: Row indices of R sequences of similar length, int64 [R, S] each. Padding on the right has any index.
        unpack_index_N: Index of each row in the concatenation of the flattened blocks, int64 [N].
    """

    blocks: list[Tensor] = field(default_factory=list)
    unpack_index_N: Tensor | None = None


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row, with grouped queries, without dropout."""

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
        """Return the attention output, [N, H * D].

        Args:
            query: Queries, [N, H, D].
            key: Keys, [N, G, D].
            value: Values, [N, G, D].
            attention_mask: Unused.
            packed_seq_params: Positions of the sequences.
        """
        outputs = []
        for rows_RS in packed_seq_params.blocks:
            q, k, v = (x[rows_RS].transpose(1, 2) for x in (query, key, value))  # [R, heads, S, D]
            # Attention is causal and padding is on the right, so padding does not affect real positions.
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[packed_seq_params.unpack_index_N].flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty state: the module has no parameters."""
        return {}
