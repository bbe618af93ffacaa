"""Construction of Megatron's TransformerConfig and GPTModel from a Hugging Face model's dimensions."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.megatron.data_parallel import ddp_config
from recipe_gkd.actor.megatron.experts import adjust_experts
from recipe_gkd.actor.megatron.layer_spec import decoder_spec, ensure_megatron_supports_te
from recipe_gkd.actor.megatron.layout_checks import (
    ensure_heads_fit_context,
    ensure_layout_fits,
    ensure_ranks_have_experts,
)
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.megatron.overrides import checked_overrides
from recipe_gkd.actor.megatron.packed_attention import attention_kernel
from recipe_gkd.actor.megatron.pipeline_stages import layers_by_rank
from recipe_gkd.actor.megatron.rotary import frequencies, set_rotary_embedding
from recipe_gkd.actor.megatron.transformer_impl import KEY, ResolvedImpl, resolve_transformer_impl
from recipe_gkd.actor.student_dims import MoEConfig
from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.config.megatron_fields import FIXED_FIELDS
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError

log = logging.getLogger(__name__)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda gate: gate * torch.sigmoid(1.702 * gate),
}
_PACKAGE = re.compile(r"\bTE\b|transformer[-_ ]engine[><=]|install|version|apex", re.IGNORECASE)
"""Text of Megatron's errors about packages. They have the same classes as its errors about values."""


def transformer_config(dims: ModelDims, config: MegatronConfig, device: torch.device) -> TransformerConfig:
    """Return Megatron's configuration, with ``override_transformer_config`` applied last.

    Args:
        config: Parallel layout, data type and overrides.

    Raises:
        ConfigError: The layout does not divide the model, an override is unknown or not allowed, or Transformer Engine
            cannot be used.
    """
    ensure_layout_fits(dims, config)
    impl = layer_implementation(dims, config, device.type)
    if impl == "transformer_engine":
        ensure_megatron_supports_te()
    transformer = _build_config(dims, config, device, impl)
    ensure_ranks_have_experts(dims.moe, layers_by_rank(transformer))
    if config.context_parallel_size > 1 and attention_kernel(transformer) is not AttentionKernel.TE_FUSED:
        ensure_heads_fit_context(dims, config)
    return transformer


def layer_implementation(dims: ModelDims, config: MegatronConfig, device_type: str) -> ResolvedImpl:
    """Return the implementation of the layers; see :func:`resolve_transformer_impl`.

    Raises:
        ConfigError: Transformer Engine is required, and does not compute this model.
    """
    if not dims.needs_local_layers:
        return resolve_transformer_impl(config.transformer_impl, device_type)
    if config.transformer_impl == "transformer_engine":
        raise ConfigError(
            f"{KEY}=transformer_engine, but a {dims.family} student has {dims.needs_local_layers}, which only the "
            "layers of torch compute here",
            remedy="set it to auto or local",
            keys=(KEY,),
        )
    return resolve_transformer_impl("local", device_type)


def check_overrides(dims: ModelDims, config: MegatronConfig, device: str) -> None:
    """Check ``override_transformer_config`` and ``override_ddp_config`` before a worker starts.

    Args:
        config: Parallel layout, data type and overrides.
        device: ``trainer.device``. If it can be a GPU, the layers and the packages of the workers are unknown.
            Overrides are accepted if they fit some layers. If this machine lacks a package for them, a warning is
            logged, and the workers check them again.

    Raises:
        ConfigError: An override is unknown or not allowed, has a value that Megatron does not accept, or divides the
            layers so that a pipeline rank has no experts.
    """
    ddp_config(config, overlaps=True)
    implementations: list[ResolvedImpl] = ["local"]
    if device != "cpu" and config.transformer_impl != "local" and not dims.needs_local_layers:
        implementations.append("transformer_engine")
    problems = []
    for impl in implementations:
        try:
            built = _build_config(dims, config, torch.device("cpu"), impl)
        except ConfigError as error:
            problems.append(error)
        else:
            return ensure_ranks_have_experts(dims.moe, layers_by_rank(built))
    of_packages = [error for error in problems if _needs_package(error)]
    if device == "cpu" or not of_packages:
        raise problems[0]
    log.warning(
        "%s.override_transformer_config: Megatron refuses a value with the packages of this machine: %s; the workers "
        "check it with theirs",
        MEGATRON,
        of_packages[0].__cause__,
    )


def _needs_package(error: ConfigError) -> bool:
    """Return True if Megatron refuses an override because a package is missing here, or has another version."""
    return isinstance(error.__cause__, ImportError) or _PACKAGE.search(str(error.__cause__)) is not None


def _build_config(
    dims: ModelDims, config: MegatronConfig, device: torch.device, impl: ResolvedImpl
) -> TransformerConfig:
    overrides = checked_overrides(
        "override_transformer_config", config.override_transformer_config, TransformerConfig, FIXED_FIELDS
    )
    if overrides.get("moe_router_fusion") and dims.moe is not None and dims.moe.corrects_softmax:
        raise ConfigError(
            f"{MEGATRON}.override_transformer_config.moe_router_fusion=true, but a fused router does not correct the "
            f"softmax scores of a {dims.family} student",
            remedy="remove it",
            keys=(f"{MEGATRON}.override_transformer_config",),
        )
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    values: dict[str, Any] = dict(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        **_attention_fields(dims, impl),
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        layernorm_zero_centered_gamma=dims.norm_offset,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[dims.activation],
        activation_func_clamp_value=dims.gate_limit,
        glu_linear_offset=dims.up_offset,
        add_bias_linear=dims.linear_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_layout_fields(config, device),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,  # the gradient is divided once, by the global number of tokens
        variable_seq_lengths=True,  # packed micro-batches differ in length; see `StageCommunicator`
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths requires it, also in a dense model
        **_moe_fields(dims.moe, config, grouped_gemm=impl == "transformer_engine"),
        **_implementation_fields(impl),
        # Dense layers have an activation module of this project; see `decoder_spec`.
        use_te_activation_func=(
            dims.moe is None and dims.activation == "silu" and not overrides.get("bias_activation_fusion")
        ),
        use_cpu_initialization=device.type == "cpu",
        # Every parameter is loaded from the Hugging Face folder, so none is initialized. perform_initialization=False
        # is not sufficient: it would also skip the attributes that mark divided parameters for the gradient norm.
        init_method=_skip_init,
        output_layer_init_method=_skip_init,
        embedding_init_method=_skip_init,
    )
    try:
        return (MLATransformerConfig if dims.latent else TransformerConfig)(**values | overrides)
    except Exception as error:
        if not overrides:
            raise
        raise ConfigError(
            f"{MEGATRON}.override_transformer_config={overrides}: Megatron refuses these values: {error}",
            remedy="correct or remove them",
            keys=(f"{MEGATRON}.override_transformer_config",),
        ) from error


def _attention_fields(dims: ModelDims, impl: ResolvedImpl) -> dict[str, Any]:
    attention = [dims.attention_of(layer) for layer in range(dims.layers)]
    windows = {layer.window for layer in attention if layer.window is not None}
    assert len(windows) <= 1, "Megatron's configuration has one window"
    fields: dict[str, Any] = dict(
        num_attention_heads=dims.heads,
        num_query_groups=dims.n_key_heads,
        kv_channels=dims.query_dim,
        add_qkv_bias=dims.qkv_bias,
        # Megatron sums the gradients of these norms over the tensor-parallel ranks, which is right for single heads.
        qk_layernorm=dims.qk_norm == "head",
        softmax_scale=_softmax_scale(dims, impl),
        softmax_type="learnable" if dims.sinks else "vanilla",
        window_size=(windows.pop() - 1, 0) if windows else None,
        window_attn_skip_freq=[int(layer.window is not None) for layer in attention],
        no_rope_freq=[int(layer.rope is None) for layer in attention] if dims.attention else None,
        rotary_interleaved=dims.ropes[0].interleaved and not dims.latent,
    )
    if (latent := dims.latent) is not None:
        fields |= dict(
            q_lora_rank=latent.q_rank,
            kv_lora_rank=latent.kv_rank,
            qk_head_dim=latent.nope,
            qk_pos_emb_head_dim=latent.rope,
            v_head_dim=latent.value,
            rope_type="rope",  # `PackedRotaryEmbedding` takes the place of Megatron's embedding
        )
    return fields


def _softmax_scale(dims: ModelDims, impl: ResolvedImpl) -> float | None:
    if impl == "local":
        return dims.softmax_scale
    # Transformer Engine's kernel has no factor of cosines and sines. Queries and keys both have it.
    _, factor = frequencies(dims.ropes[0])
    return dims.softmax_scale if factor == 1 else factor**2 * (dims.softmax_scale or dims.head_dim**-0.5)


def _implementation_fields(impl: ResolvedImpl) -> dict[str, Any]:
    uses_te = impl == "transformer_engine"
    return dict(
        transformer_impl=impl,
        # With `auto`, Transformer Engine stores the scores, [S, S] for each head, if cuDNN's fused attention does not
        # support the input. With `fused` this is an error.
        attention_backend=AttnBackend.fused if uses_te else AttnBackend.auto,
        # Without Transformer Engine, fused kernels are missing or would be compiled at first use.
        # Without the package, a driver checks the overrides of workers that have it.
        apply_rope_fusion=uses_te and gpt_layer_specs.HAVE_TE,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _layout_fields(config: MegatronConfig, device: torch.device) -> dict[str, Any]:
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    return dict(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        sequence_parallel=config.sequence_parallel and config.tensor_model_parallel_size > 1,
        # Interleaved stages with micro-batches of different lengths need unbatched communication. Without
        # interleaving, batched communication is faster.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # The default waits for the GPU after each exchange between stages, which only old versions of torch need.
        batch_p2p_sync=False,
    )


def _moe_fields(moe: MoEConfig | None, config: MegatronConfig, *, grouped_gemm: bool) -> dict[str, Any]:
    # There is no auxiliary loss that balances the experts: Megatron's coefficient is 0 by default.
    if moe is None:
        return {}
    return dict(
        num_moe_experts=moe.experts,
        moe_layer_freq=[int(is_moe) for is_moe in moe.layers],
        moe_ffn_hidden_size=moe.ffn,
        moe_shared_expert_intermediate_size=moe.shared_ffn,
        moe_shared_expert_gate=moe.shared_ffn is not None and moe.shared_gate,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=moe.score == "softmax" and not moe.normalized,
        moe_router_score_function=moe.score,
        moe_router_num_groups=moe.groups[0] if moe.groups else None,
        moe_router_group_topk=moe.groups[1] if moe.groups else None,
        moe_router_topk_scaling_factor=moe.scale if moe.scale != 1 else None,
        moe_router_enable_expert_bias=moe.score_bias and not moe.corrects_softmax,
        moe_router_bias_update_rate=0.0,  # the correction stays as it is in the folder
        moe_router_dtype="fp32",  # rounding to bfloat16 must not select other experts
        moe_grouped_gemm=grouped_gemm,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )


def _skip_init(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def build_chunks(dims: ModelDims, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """Return this rank's part of the model, uninitialized: one chunk, or one per virtual pipeline stage.

    Args:
        config: Megatron's configuration from :func:`transformer_config`.
        device: Device of the parameters.
    """
    chunks = []
    virtual_stages = config.virtual_pipeline_model_parallel_size
    for stage in range(virtual_stages or 1):
        vp_stage = stage if virtual_stages else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec(dims, config, vp_stage),
            vocab_size=dims.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=dims.max_positions,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=dims.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        set_rotary_embedding(chunk, dims, config)
        if dims.embedding_scale != 1 and chunk.pre_process:
            chunk.embedding.register_forward_hook(partial(_scale_embedding, dims.embedding_scale))
        adjust_experts(chunk)
        chunks.append(chunk.to(device))
    return chunks


def _scale_embedding(scale: float, module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * torch.tensor(scale, dtype=output.dtype)  # the factor is rounded as in transformers
