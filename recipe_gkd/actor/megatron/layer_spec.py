"""Modules of a transformer layer, from Transformer Engine or from torch.

Megatron's "local" spec is not sufficient: its norm rejects sequence parallelism and ignores ``params_dtype``, and its
attention allocates an S x S score matrix and does not support packed sequences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.megatron.gated_silu import GatedSilu
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.megatron.norms import (
    AllHeadsNormAttention,
    LatentAttentionWithNorms,
    LayerWithNormsAfter,
    RMSNorm,
)
from recipe_gkd.actor.megatron.packed_attention import PackedAttention, attention_kernel
from recipe_gkd.actor.megatron.transformer_impl import KEY, REMEDY, installed_version
from recipe_gkd.errors import ConfigError

_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
"""Names in checkpoints of the norms in front of experts: those of Megatron's local layers."""


def decoder_spec(
    dims: ModelDims, config: TransformerConfig, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec for GPTModel of the layers of this pipeline stage.

    Args:
        dims: Norms of the model.
        config: Megatron's configuration.
        vp_stage: Virtual pipeline stage; None without interleaving.
    """
    if config.transformer_impl == "transformer_engine":
        return _transformer_engine_spec(config, vp_stage)
    # With a layer spec, TransformerBlock would choose its own final norm, so a block spec is used.
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        _set_modules(layer, dims)
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
        _set_activation(layer, config)
    return block


def _transformer_engine_spec(
    config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    spec: ModuleSpec | TransformerBlockSubmodules
    if config.num_moe_experts is None:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        layers = [spec]
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        layers = spec.layer_specs
    if attention_kernel(config) is not AttentionKernel.TE_FUSED:
        # Transformer Engine would pad the sequences to one length S and store the scores, [S, S] for each head.
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
    for layer in layers:
        _set_activation(layer, config)
        layer.submodules.sharded_state_dict_keys_map |= _NORM_KEYS
    return spec


def _set_modules(layer: ModuleSpec, dims: ModelDims) -> None:
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm if dims.norms != "after" else IdentityOp
    if dims.norms != "before":
        layer.module = LayerWithNormsAfter
    if dims.latent is not None:
        parts.self_attention.module = LatentAttentionWithNorms
        # With divided projections, Megatron would not sum the gradient of the shared part of the keys over the ranks.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    elif dims.qk_norm == "head":
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    elif dims.qk_norm == "all_heads":
        parts.self_attention.module = AllHeadsNormAttention


def _set_activation(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Replace Megatron's activation of a dense layer, which stores a third more per token and column."""
    if config.use_te_activation_func:
        mlp_submodules(layer).activation_func = GatedSilu


def mlp_submodules(layer: ModuleSpec) -> Any:
    """Return the submodules of the MLP of a dense layer.

    Args:
        layer: Spec of the layer. Its MLP is a spec in Megatron 0.16 and a partial function in 0.19.
    """
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def ensure_megatron_supports_te() -> None:
    """Check that Megatron found all parts of Transformer Engine that its layers need.

    Raises:
        ConfigError: It did not.
    """
    if not gpt_layer_specs.HAVE_TE:
        raise ConfigError(
            f"megatron-core cannot use Transformer Engine {installed_version()}, because a name that it imports is "
            "missing there",
            remedy=REMEDY,
            keys=(KEY,),
        )
