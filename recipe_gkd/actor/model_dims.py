"""The numbers of a model, out of its folder: Qwen2, Qwen3 and Llama, and the mixtures Qwen2-MoE, Qwen3-MoE and Mixtral.

Imports no Megatron, and transformers only to read a folder: the driver refuses a model before it starts any process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mixtral")
"""Values of `model_type`; Qwen2.5 is qwen2."""

VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of this: one shape for any tensor-parallel size, so that a checkpoint moves."""

MEGATRON = "actor_rollout_ref.actor.megatron"

# The numbers of llama3 rotary scaling that Megatron has built in; only `factor` can be passed to it.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The layers in which a router sends each token to a few of many experts."""

    layers: tuple[bool, ...]
    """Which layers are such; the others are dense."""
    experts: int
    top_k: int
    """Experts of a token."""
    ffn: int
    """Feed-forward columns of one expert."""
    normalized: bool
    """Whether the weights of a token's experts sum to 1."""
    shared_ffn: int | None
    """Feed-forward columns of an expert for every token, behind a gate of its own; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class ModelDims:
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
    """``max_position_embeddings``: the longest sequence that the model was made for."""
    rope_base: float
    rope_llama3_factor: float | None
    mixture: MoEConfig | None = None
    """None: all layers are dense."""

    def padded_vocab(self, tp_size: int) -> int:
        multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp_size == 0 else VOCAB_MULTIPLE * tp_size
        return -(-self.vocab_size // multiple) * multiple


def read_model_dims(path: str | Path, *, trust_remote_code: bool = False) -> ModelDims:
    """Raise :class:`ModelError` if there is no model in the folder ``path``, or none that is supported."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(f"no config.json in {path}; actor_rollout_ref.model.path must be a Hugging Face model folder")
    try:
        family = json.loads(file.read_text()).get("model_type")
        known = family in FAMILIES  # asked first, because transformers refuses what it has not heard of
        hf = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code) if known else None
    except (OSError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelError(
            f"{file} cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); expected the file "
            "that save_pretrained writes"
        ) from error
    if hf is None:
        raise ModelError(f"{path} is a {family!r} model; the actor can train: {', '.join(FAMILIES)}")
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
        mixture=_mixture(hf),
    )


def _mixture(hf: PretrainedConfig) -> MoEConfig | None:
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
    unusual = {
        "hidden_act": getattr(hf, "hidden_act", "silu") != "silu",
        "use_sliding_window": bool(getattr(hf, "use_sliding_window", False)),
        "attention_bias": bool(getattr(hf, "attention_bias", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
        "attention_dropout": bool(getattr(hf, "attention_dropout", 0.0)),
        "sliding_window": hf.model_type == "mixtral" and hf.sliding_window is not None,
        "router_jitter_noise": bool(getattr(hf, "router_jitter_noise", 0.0)),
        # Megatron cannot normalize the weight of one expert (to 1).
        "num_experts_per_tok": (mixture := _mixture(hf)) is not None and mixture.normalized and mixture.top_k == 1,
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


def check_fits(shape: ModelDims, config: MegatronConfig) -> None:
    """Raise :class:`ConfigError` for widths, experts and layers that the layout does not divide."""
    tp = config.tensor_model_parallel_size
    ffn = _tensor_parallel_ffn(shape)
    if any(number % tp for number in (shape.heads, shape.kv_heads, *ffn)):
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size is {tp}; it must divide the model's {shape.heads} heads, "
            f"{shape.kv_heads} key/value heads and {' and '.join(map(str, ffn)) or 'no'} feed-forward columns"
        )
    _check_experts(shape.mixture, config)
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if shape.layers % stages and not config.override_transformer_config:  # which may say how to divide them
        raise ConfigError(
            f"{shape.layers} layers cannot be divided equally into {stages} pipeline stages "
            "(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size)"
        )
    if shape.mixture is not None and not config.override_transformer_config:
        _check_stages_have_experts(shape.mixture.layers, config.pipeline_model_parallel_size, stages)


def _tensor_parallel_ffn(shape: ModelDims) -> list[int]:
    """The widths of the feed-forward layers that are no experts: of dense layers, and of the shared expert."""
    if shape.mixture is None:
        return [shape.ffn]
    dense = [] if all(shape.mixture.layers) else [shape.ffn]
    return dense if shape.mixture.shared_ffn is None else [*dense, shape.mixture.shared_ffn]


def _check_experts(mixture: MoEConfig | None, config: MegatronConfig) -> None:
    tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
    etp = config.expert_tensor_parallel_size
    if mixture is None:
        if ep > 1 or (etp or 1) > 1:
            raise ConfigError(
                f"{MEGATRON}.expert_model_parallel_size={ep}, expert_tensor_parallel_size={etp}: the student has no "
                "experts to divide; set 1 and null"
            )
        return
    if mixture.experts % ep:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size is {ep}; it must divide the model's {mixture.experts} experts"
        )
    if mixture.ffn % (etp or tp):
        raise ConfigError(
            f"{MEGATRON}.expert_tensor_parallel_size is {etp or tp}{'' if etp else ' (that of tensor parallel)'}; it "
            f"must divide the {mixture.ffn} feed-forward columns of an expert, or be 1"
        )
    if tp > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size={tp} without sequence_parallel: a mixture of experts is trained "
            f"with both; set {MEGATRON}.sequence_parallel=true"
        )


def _check_stages_have_experts(layers: tuple[bool, ...], ranks: int, stages: int) -> None:
    """Megatron cannot save the optimizer of a rank whose layers are all dense while those of others have experts."""
    per_stage = len(layers) // stages
    for rank in range(ranks):
        if not any(any(layers[stage * per_stage :][:per_stage]) for stage in range(rank, stages, ranks)):
            raise ConfigError(
                f"{MEGATRON}.pipeline_model_parallel_size={ranks}: pipeline rank {rank} would have dense layers only, "
                "and others experts; choose fewer stages (layers with experts: "
                f"{', '.join(str(number) for number, is_mixture in enumerate(layers) if is_mixture)})"
            )
