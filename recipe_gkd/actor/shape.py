"""The numbers of a model, out of its folder: dense Qwen2, Qwen3 and Llama.

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
    """``max_position_embeddings``: the longest sequence that the model was made for."""
    rope_base: float
    rope_llama3_factor: float | None

    def padded_vocab(self, tp_size: int) -> int:
        multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp_size == 0 else VOCAB_MULTIPLE * tp_size
        return -(-self.vocab_size // multiple) * multiple


def read_shape(path: str | Path, *, trust_remote_code: bool = False) -> ModelShape:
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
        raise ModelError(f"{path} is a {family!r} model; the actor can train: {', '.join(FAMILIES)} (dense)")
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


def check_fits(shape: ModelShape, config: MegatronConfig) -> None:
    """Raise :class:`ConfigError` for widths and layers that the layout does not divide."""
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
