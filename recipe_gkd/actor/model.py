"""A Hugging Face folder's config -> Megatron's TransformerConfig and GPTModel, for dense Qwen2, Qwen3 and Llama."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, PretrainedConfig

from recipe_gkd.actor.layer_spec import decoder_spec, has_transformer_engine
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError, ModelError

FAMILIES = ("qwen2", "qwen3", "llama")
"""Values of `model_type`; Qwen2.5 is qwen2."""

VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of this: one shape for any tensor-parallel size, so that a checkpoint moves."""

# The numbers of llama3 rotary scaling that Megatron has built in; only `factor` can be passed to it.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What is needed to build the model and to convert its weights."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int
    rope_base: float
    rope_llama3_factor: float | None

    def padded_vocab(self, tp_size: int) -> int:
        multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp_size == 0 else VOCAB_MULTIPLE * tp_size
        return -(-self.vocab_size // multiple) * multiple


def read_shape(path: str | Path, *, trust_remote_code: bool = False) -> ModelShape:
    """Raise :class:`ModelError` if there is no model in the folder ``path``, or none that is supported."""
    if not (Path(path) / "config.json").is_file():
        raise ModelError(f"no config.json in {path}; actor_rollout_ref.model.path must be a Hugging Face model folder")
    hf = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    _check_supported(hf, path)
    rope = _rope(hf, path)
    return ModelShape(
        family=hf.model_type,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        ffn=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        tied=bool(hf.tie_word_embeddings),
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type == "qwen3",
        norm_eps=hf.rms_norm_eps,
        max_positions=hf.max_position_embeddings,
        rope_base=float(rope["rope_theta"]),
        rope_llama3_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
    )


def _check_supported(hf: PretrainedConfig, path: str | Path) -> None:
    if hf.model_type not in FAMILIES:
        raise ModelError(f"{path} is a {hf.model_type!r} model; the actor can train: {', '.join(FAMILIES)} (dense)")
    unusual = {
        "hidden_act": getattr(hf, "hidden_act", "silu") != "silu",
        "use_sliding_window": bool(getattr(hf, "use_sliding_window", False)),
        "attention_bias": bool(getattr(hf, "attention_bias", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
        "attention_dropout": bool(getattr(hf, "attention_dropout", 0.0)),
    }
    if found := [f"{name}={getattr(hf, name)}" for name, is_unusual in unusual.items() if is_unusual]:
        raise ModelError(f"{path}: {', '.join(found)} in config.json is not supported for a {hf.model_type} student")


def _rope(hf: PretrainedConfig, path: str | Path) -> dict[str, Any]:
    """``rope_theta``, ``rope_type`` and its numbers; transformers 5 keeps all of them in ``rope_parameters``."""
    rope = {"rope_type": "default", "rope_theta": getattr(hf, "rope_theta", 10000.0)}
    rope |= getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    if rope["rope_type"] == "default":
        return rope
    if rope["rope_type"] != "llama3" or any(rope.get(name) != value for name, value in LLAMA3_ROPE.items()):
        raise ModelError(
            f"{path}: rotary scaling {rope} is not supported; expected none, or type llama3 with {LLAMA3_ROPE} "
            "and any factor"
        )
    return rope


def transformer_config(shape: ModelShape, config: MegatronConfig, device: torch.device) -> TransformerConfig:
    """Megatron's config, with ``override_transformer_config`` applied last.

    Raises :class:`ConfigError` for an unknown override, and for widths that the layout does not divide.
    """
    tp = config.tensor_model_parallel_size
    if shape.heads % tp or shape.kv_heads % tp or shape.ffn % tp:
        raise ConfigError(
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size is {tp}; it must divide the model's "
            f"{shape.heads} heads, {shape.kv_heads} key/value heads and {shape.ffn} feed-forward columns"
        )
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if shape.layers % stages and not config.override_transformer_config:  # which may say how to divide them
        raise ConfigError(
            f"{shape.layers} layers cannot be divided equally into {stages} pipeline stages "
            "(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size)"
        )
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
        tensor_model_parallel_size=tp,
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


def _leave_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _known(overrides: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(TransformerConfig) if field.init]
    for name in overrides:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "see megatron.core.transformer.TransformerConfig"
            raise ConfigError(f"actor_rollout_ref.actor.megatron.override_transformer_config.{name} is unknown: {hint}")
    return overrides


def build_chunks(shape: ModelShape, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """This rank's part of the model, uninitialised: one chunk, or one for each virtual pipeline stage."""
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
        chunks.append(chunk.to(device))
    return chunks
