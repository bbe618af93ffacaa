"""A Hugging Face folder's config -> Megatron's TransformerConfig and GPTModel."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from recipe_gkd.actor.layer_spec import decoder_spec, has_transformer_engine
from recipe_gkd.actor.model_dims import ModelDims, MoEConfig, check_fits
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError


def transformer_config(shape: ModelDims, config: MegatronConfig, device: torch.device) -> TransformerConfig:
    """Megatron's config, with ``override_transformer_config`` applied last.

    Raises :class:`ConfigError` for an unknown override, and as :func:`check_fits` does.
    """
    check_fits(shape, config)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    values: dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,  # the sum over tokens is divided by their global number, once, at the end
        variable_seq_lengths=True,  # packed rows differ in length from one micro-batch to the next
        moe_token_dispatcher_type="alltoall",  # which variable_seq_lengths requires, of dense models too
        **_mixture(shape.mixture, config),
        use_cpu_initialization=device.type == "cpu",
        # Every parameter is read from the Hugging Face folder. (Not perform_initialization=False: that would also leave
        # out the attributes by which the norm of the gradient knows which parameters are divided.)
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        embedding_init_method=_leave_as_it_is,
        # Interleaved stages of uneven lengths only work with these; plain ones are faster batched.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Fused kernels come with Transformer Engine; without it each is either missing or compiled at first use.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=has_transformer_engine(),
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    return TransformerConfig(**values | _known(config.override_transformer_config))


def _mixture(mixture: MoEConfig | None, config: MegatronConfig) -> dict[str, Any]:
    """Without an auxiliary loss that balances the experts: Megatron's coefficient is 0 unless it is overridden."""
    if mixture is None:
        return {}
    return dict(
        num_moe_experts=mixture.experts,
        moe_layer_freq=[int(is_mixture) for is_mixture in mixture.layers],
        moe_ffn_hidden_size=mixture.ffn,
        moe_shared_expert_intermediate_size=mixture.shared_ffn,
        moe_shared_expert_gate=mixture.shared_ffn is not None,
        moe_router_topk=mixture.top_k,
        moe_router_pre_softmax=not mixture.normalized,
        moe_router_dtype="fp32",  # which experts a token goes to is not left to bfloat16
        moe_grouped_gemm=has_transformer_engine(),
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )


def _leave_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


OURS = {
    "calculate_per_token_loss": "the objective is a mean over the global batch",
    "variable_seq_lengths": "sequences are packed",
    "mtp_num_layers": "there is no loss for tokens further ahead",
}
"""Fields that may not be overridden, and why."""


def _known(overrides: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(OURS.keys() & overrides.keys()):
        raise ConfigError(
            f"actor_rollout_ref.actor.megatron.override_transformer_config.{name}={overrides[name]}: {OURS[name]}, "
            "which depends on it; remove the override"
        )
    names = [field.name for field in dataclasses.fields(TransformerConfig) if field.init]
    for name in overrides:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "see megatron.core.transformer.TransformerConfig"
            raise ConfigError(f"actor_rollout_ref.actor.megatron.override_transformer_config.{name} is unknown: {hint}")
    return overrides


def build_chunks(shape: ModelDims, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """This rank's part of the model, uninitialized: one chunk, or one for each virtual pipeline stage."""
    chunks = []
    virtual_stages = config.virtual_pipeline_model_parallel_size
    for stage in range(virtual_stages or 1):
        vp_stage = stage if virtual_stages else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec(config, vp_stage),
            vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_base,
            rope_scaling=shape.rope_llama3_factor is not None,
            rope_scaling_factor=shape.rope_llama3_factor or 1.0,
            vp_stage=vp_stage,
        )
        _give_experts_their_own_buffers(chunk)
        chunks.append(chunk.to(device))
    return chunks


def _give_experts_their_own_buffers(chunk: GPTModel) -> None:
    """Gradients of experts are summed over the experts' data-parallel group, and have an optimizer of their own.

    Megatron says so only of experts that are divided among ranks (tensor_parallel/layers.py:886). Said of all of them,
    a whole set of experts on each tensor-parallel rank is right too, whose tokens differ, and the optimizer's state
    moves between layouts that divide experts and those that do not.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
