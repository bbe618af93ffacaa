"""Fields of Megatron's TransformerConfig that ``override_transformer_config`` must not set."""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ConfigError

_KEYS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "transformer_impl",
)  # fmt: skip
_DTYPES = ("params_dtype", "pipeline_dtype", "bf16", "fp16")
_RANDOM = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing")
_WEIGHT_SHARDS = (
    "tensor_parallel_num_weight_shards", "gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size",
)  # fmt: skip
_NEWER_MODEL = ("use_mup", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm",
    "gated_linear_unit", "activation_func", "activation_func_clamp_value", "glu_linear_offset", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "softmax_scale", "softmax_type", "window_size",
    "window_attn_skip_freq", "no_rope_freq", "attention_output_gate", "multi_latent_attention",
    "experimental_attention_variant", "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_topk", "moe_router_pre_softmax",
    "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_topk_limited_devices",
    "moe_apply_probs_on_input", "rotary_interleaved",
)  # fmt: skip
_SAME_MODEL = "the actor and the rollout engine must compute the model of config.json"
_DROPS_TOKENS = f"tokens above the capacity have no experts, and {_SAME_MODEL}"
_CUDA_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
_NO_NOISE = "the rollout engine's log-probabilities have no such noise"
# Fields that Megatron 0.19 has and 0.16 does not have.
NEWER_FIELDS = {
    **dict.fromkeys(_WEIGHT_SHARDS, "the weight sync and checkpoints do not support such shards"),
    **dict.fromkeys(_NEWER_MODEL, _SAME_MODEL),
    "moe_router_force_biased": _NO_NOISE,
    "moe_expert_rank_capacity_factor": _DROPS_TOKENS,
}
# Fields that must not be overridden, each with the reason.
FIXED_FIELDS = {
    **{name: f"it is the key {MEGATRON}.{name}" for name in _KEYS},
    **dict.fromkeys(_DTYPES, f"it follows from the key {MEGATRON}.dtype"),
    **dict.fromkeys(_MODEL, _SAME_MODEL),
    **dict.fromkeys(_RANDOM, _NO_NOISE),
    **NEWER_FIELDS,
    "moe_expert_capacity_factor": _DROPS_TOKENS,
    **dict.fromkeys(_CUDA_GRAPHS, "a CUDA graph has inputs of one length, but packed rows differ in length"),
    "num_microbatches_with_partial_activation_checkpoints": "the actor recomputes the same layers in each micro-batch",
    "calculate_per_token_loss": "the objective is a mean over the global batch",
    "variable_seq_lengths": "sequences are packed",
    "attention_backend": "it is chosen for the GPU, so that no matrix of scores is stored",
    "mtp_num_layers": "there is no loss for multi-token prediction",
    "use_te_activation_func": "the actor chooses the activation of its layers",
    "use_cpu_initialization": "it follows from the key trainer.device",
    "perform_initialization": "it would also skip the marks of divided parameters, which the gradient norm needs",
}

_FLOAT32_RESIDUAL = "fp32_residual_connection"
_BALANCING = "moe_router_load_balancing_type"
_CHOOSES_EXPERTS = ("sinkhorn", "quantile_balancing")
"""Values of this field with which the router chooses other experts than the model of config.json."""


def fixed_field_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each field that must not be set, or has a value that it must not have."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        return
    overrides = actor.megatron.override_transformer_config
    for name in sorted(FIXED_FIELDS.keys() & overrides.keys()):
        yield ConfigError(
            f"{MEGATRON}.override_transformer_config.{name}={overrides[name]} is not allowed, because "
            f"{FIXED_FIELDS[name]}",
            remedy="remove it",
            keys=(f"{MEGATRON}.override_transformer_config.{name}",),
        )
    pp = actor.megatron.pipeline_model_parallel_size
    if overrides.get(_FLOAT32_RESIDUAL) and pp > 1 and actor.megatron.dtype != "float32":
        yield ConfigError(
            f"{MEGATRON}.override_transformer_config.{_FLOAT32_RESIDUAL}=true with "
            f"{MEGATRON}.pipeline_model_parallel_size={pp}: the stages exchange hidden states in {MEGATRON}.dtype="
            f"{actor.megatron.dtype}",
            remedy=f"remove it, or set {MEGATRON}.dtype=float32",
            keys=tuple(
                f"{MEGATRON}.{name}"
                for name in (
                    f"override_transformer_config.{_FLOAT32_RESIDUAL}",
                    "pipeline_model_parallel_size",
                    "dtype",
                )
            ),
        )
    balancing = overrides.get(_BALANCING)
    for value in balancing if isinstance(balancing, list) else [balancing]:
        if value in _CHOOSES_EXPERTS:
            yield ConfigError(
                f"{MEGATRON}.override_transformer_config.{_BALANCING}={balancing} is not allowed, because {value} "
                f"chooses other experts, and {_SAME_MODEL}",
                remedy="remove it, or set it to aux_loss, seq_aux_loss, global_aux_loss or none",
                keys=(f"{MEGATRON}.override_transformer_config.{_BALANCING}",),
            )
