"""Dimensions of a Hugging Face model: Qwen2, Qwen3, Llama, Qwen2-MoE, Qwen3-MoE and Mixtral.

This module imports no Megatron, and imports transformers only when it reads a folder. The driver therefore rejects an
unsupported model before it starts a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.actor.student_dims import MoEConfig, StudentDims, load_hf_config, read_config_json
from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Supported values of `model_type`. Qwen2.5 has the type qwen2.
FAMILIES = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mixtral")

# The embedding is padded to a multiple of this number. The padded size is then the same for every tensor-parallel size
# that divides it, and a checkpoint can be loaded with another tensor-parallel size.
VOCAB_MULTIPLE = 128


# Fields of `override_transformer_config` with which pipeline stages have different numbers of layers.
UNEQUAL_STAGES = {
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
}  # fmt: skip

# Constants of llama3 rotary scaling in Megatron. Only `factor` is a parameter there.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, kw_only=True)
class ModelDims(StudentDims):
    """Dimensions needed to build a model and to convert its weights, in addition to :class:`StudentDims`.

    Attributes:
        family: One of :data:`FAMILIES`.
        tied: If true, the output layer shares the weights of the embedding.
        qkv_bias: If true, the query, key and value projections have biases.
        qk_norm: If true, queries and keys are normalized per head.
        norm_eps: Epsilon of RMSNorm.
        rope_base: Base of the rotary embedding.
        rope_llama3_factor: Factor of llama3 rotary scaling; None without scaling.
    """

    family: str
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_base: float
    rope_llama3_factor: float | None

    def padded_vocab(self, tp_size: int) -> int:
        """Return the rows of Megatron's embedding: ``vocab_size`` rounded up so that ``tp_size`` divides it."""
        multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp_size == 0 else VOCAB_MULTIPLE * tp_size
        return -(-self.vocab_size // multiple) * multiple


def read_model_dims(path: str | Path, *, trust_remote_code: bool = False) -> ModelDims:
    """Return the dimensions of a Hugging Face model.

    Args:
        path: Model folder with a ``config.json``.
        trust_remote_code: Passed to transformers.

    Raises:
        ModelError: The folder has no readable ``config.json``, or the model is not supported.
    """
    family = read_config_json(path).get("model_type")
    # The family is compared first, because transformers raises an error for a type that it does not support.
    if family not in FAMILIES:
        raise ModelError(
            f"{path} is a {family!r} model; the actor supports: {', '.join(FAMILIES)}",
            remedy="for another dense causal language model set actor_rollout_ref.actor.strategy=fsdp",
            path=Path(path),
            names=("model_type",),
        )
    hf = load_hf_config(path, trust_remote_code=trust_remote_code)
    _check_supported(hf, path)
    rope = _rope(hf, path)
    return ModelDims(
        family=hf.model_type,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        ffn=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        tied=bool(hf.tie_word_embeddings),
        qkv_bias=hf.model_type == "qwen2" or bool(getattr(hf, "qkv_bias", False)),
        qk_norm=hf.model_type in ("qwen3", "qwen3_moe"),
        norm_eps=hf.rms_norm_eps,
        max_positions=hf.max_position_embeddings,
        rope_base=float(rope["rope_theta"]),
        rope_llama3_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
        moe=_read_moe(hf),
    )


def _read_moe(hf: PretrainedConfig) -> MoEConfig | None:
    if hf.model_type == "mixtral":
        return MoEConfig(
            layers=(True,) * hf.num_hidden_layers,
            experts=hf.num_local_experts,
            top_k=hf.num_experts_per_tok,
            ffn=hf.intermediate_size,
            normalized=True,
            shared_ffn=None,
        )
    if hf.model_type not in ("qwen2_moe", "qwen3_moe"):
        return None
    layers = tuple(
        layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
        for layer in range(hf.num_hidden_layers)
    )
    if not hf.num_experts or not any(layers):
        return None
    return MoEConfig(
        layers=layers,
        experts=hf.num_experts,
        top_k=hf.num_experts_per_tok,
        ffn=hf.moe_intermediate_size,
        normalized=hf.norm_topk_prob,
        shared_ffn=hf.shared_expert_intermediate_size if hf.model_type == "qwen2_moe" else None,
    )


def _check_supported(hf: PretrainedConfig, path: str | Path) -> None:
    is_unsupported = {
        "hidden_act": getattr(hf, "hidden_act", "silu") != "silu",
        "use_sliding_window": bool(getattr(hf, "use_sliding_window", False)),
        "attention_bias": bool(getattr(hf, "attention_bias", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
        "attention_dropout": bool(getattr(hf, "attention_dropout", 0.0)),
        "sliding_window": hf.model_type == "mixtral" and hf.sliding_window is not None,
        "router_jitter_noise": bool(getattr(hf, "router_jitter_noise", 0.0)),
        # Megatron cannot normalize the weight of a single expert to 1.
        "num_experts_per_tok": (moe := _read_moe(hf)) is not None and moe.normalized and moe.top_k == 1,
    }
    if names := tuple(name for name, found in is_unsupported.items() if found):
        values = ", ".join(f"{name}={getattr(hf, name)}" for name in names)
        raise ModelError(
            f"{path}: {values} in config.json is not supported for a {hf.model_type} student",
            path=Path(path),
            names=names,
        )


def _rope(hf: PretrainedConfig, path: str | Path) -> dict[str, Any]:
    # transformers 5 stores all values in `rope_parameters`, earlier versions in `rope_theta` and `rope_scaling`.
    rope = {"rope_type": "default", "rope_theta": getattr(hf, "rope_theta", 10000.0)}
    rope |= getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(
            f"{path}: partial_rotary_factor={rope['partial_rotary_factor']} in config.json is not supported; expected "
            "1, because all channels of a head are rotated",
            path=Path(path),
            names=("partial_rotary_factor",),
        )
    if rope["rope_type"] == "default":
        return rope
    if rope["rope_type"] != "llama3" or any(rope.get(name) != value for name, value in LLAMA3_ROPE.items()):
        raise ModelError(
            f"{path}: rotary scaling {rope} is not supported; expected none, or type llama3 with {LLAMA3_ROPE} "
            "and any factor",
            path=Path(path),
            names=("rope_parameters",),
        )
    return rope


def ensure_layout_fits(dims: ModelDims, config: MegatronConfig) -> None:
    """Check that the parallel layout divides the heads, the feed-forward columns, the experts and the layers.

    Context parallelism has its own check, :func:`ensure_heads_fit_context`.

    Raises:
        ConfigError: It does not.
    """
    tp = config.tensor_model_parallel_size
    ffn = _tensor_parallel_ffn(dims)
    if any(number % tp for number in (dims.heads, dims.kv_heads, *ffn)):
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size is {tp}; it must divide the model's {dims.heads} heads, "
            f"{dims.kv_heads} key/value heads and {' and '.join(map(str, ffn)) or 'no'} feed-forward columns",
            keys=_keys("tensor_model_parallel_size"),
        )
    _check_experts(dims.moe, config)
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if UNEQUAL_STAGES & config.override_transformer_config.keys():
        return
    if dims.layers % stages:
        raise ConfigError(
            f"{dims.layers} layers cannot be divided equally into {stages} pipeline stages "
            "(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size)",
            keys=_keys("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        )
    if dims.moe is not None:
        _check_stages_have_experts(dims.moe.layers, config.pipeline_model_parallel_size, stages)


def ensure_heads_fit_context(dims: ModelDims, config: MegatronConfig) -> None:
    """Check that context-parallel ranks can exchange rows for heads, as all attention kernels but TE's fused one do.

    Raises:
        ConfigError: They cannot divide the heads. Key/value heads are copied if there are fewer of them than ranks.
    """
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    heads, kv_heads = dims.heads // tp, dims.kv_heads // tp
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise ConfigError(
            f"{MEGATRON}.context_parallel_size is {cp}; it must divide the {heads} heads of a tensor-parallel rank, "
            f"and divide its {kv_heads} key/value heads or be a multiple of them",
            remedy="choose another size, or change tensor_model_parallel_size",
            keys=_keys("context_parallel_size", "tensor_model_parallel_size"),
        )


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{MEGATRON}.{name}" for name in names)


def _tensor_parallel_ffn(dims: ModelDims) -> list[int]:
    """Return the feed-forward columns of dense layers and of the shared expert."""
    if dims.moe is None:
        return [dims.ffn]
    dense = [] if all(dims.moe.layers) else [dims.ffn]
    return dense if dims.moe.shared_ffn is None else [*dense, dims.moe.shared_ffn]


def _check_experts(moe: MoEConfig | None, config: MegatronConfig) -> None:
    tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
    etp = config.expert_tensor_parallel_size
    if moe is None:
        if ep > 1 or (etp or 1) > 1:
            raise ConfigError(
                f"{MEGATRON}.expert_model_parallel_size={ep}, expert_tensor_parallel_size={etp}: the student has no "
                "experts",
                remedy="set them to 1 and null",
                keys=_keys("expert_model_parallel_size", "expert_tensor_parallel_size"),
            )
        return
    if moe.experts % ep:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size is {ep}; it must divide the model's {moe.experts} experts",
            keys=_keys("expert_model_parallel_size"),
        )
    if moe.ffn % (etp or tp):
        raise ConfigError(
            f"{MEGATRON}.expert_tensor_parallel_size is {etp or tp}"
            f"{'' if etp else ' (from tensor_model_parallel_size)'}; it must divide the {moe.ffn} feed-forward columns "
            "of an expert, or be 1",
            keys=_keys("expert_tensor_parallel_size"),
        )
    if tp > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size={tp} without sequence_parallel: a mixture-of-experts model "
            "needs both",
            remedy=f"set {MEGATRON}.sequence_parallel=true",
            keys=_keys("sequence_parallel", "tensor_model_parallel_size"),
        )


def _check_stages_have_experts(layers: tuple[bool, ...], ranks: int, stages: int) -> None:
    # Megatron cannot save the optimizer if one rank has dense layers only and another rank has experts.
    per_stage = len(layers) // stages
    for rank in range(ranks):
        if not any(any(layers[stage * per_stage :][:per_stage]) for stage in range(rank, stages, ranks)):
            raise ConfigError(
                f"{MEGATRON}.pipeline_model_parallel_size={ranks}: pipeline rank {rank} would have dense layers only, "
                "while other ranks have experts",
                remedy="choose fewer stages (layers with experts: "
                f"{', '.join(str(number) for number, is_moe in enumerate(layers) if is_moe)})",
                keys=_keys("pipeline_model_parallel_size"),
            )
