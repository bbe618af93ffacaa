"""Dimensions of a causal language model of transformers, and the models that this backend cannot train.

This module imports transformers only when it reads a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.actor.fsdp.mixtures import MIXTURES, read_experts, read_latent_attention
from recipe_gkd.actor.student_dims import StudentDims, check_not_quantized, load_hf_config, read_config_json
from recipe_gkd.errors import ModelError
from teacher.common.position_limit import position_limit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GATED_FAMILIES = frozenset({
    "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite",
    "hunyuan_v1_dense", "llama", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen3", "seed_oss", "smollm3",
})  # fmt: skip
"""Values of ``model_type`` whose layers have the matrix products that :mod:`recipe_gkd.metrics.flops` counts."""

FULL_ATTENTION = "full_attention"
"""Kind of a layer that attends to all tokens, in ``layer_types``."""


@dataclass(frozen=True, kw_only=True)
class CausalLMDims(StudentDims):
    """Dimensions of a model of any architecture.

    Attributes:
        family: ``model_type`` of the text model.
        cached_layers: See :meth:`n_cached_layers`. 0 if unknown.
        window: Number of tokens that some layers attend to; 0 if all layers attend to all tokens.
    """

    family: str
    cached_layers: int
    window: int

    def n_cached_layers(self) -> int:
        """Return the number of layers that keep the keys and values of all tokens of a sequence."""
        return self.cached_layers

    def windows(self) -> list[int | None]:
        """Return the window of each layer, those without one first."""
        if not self.window:
            return super().windows()
        return [None] * self.cached_layers + [self.window] * (self.layers - self.cached_layers)

    def flops_problem(self) -> str | None:
        """Return why :mod:`recipe_gkd.metrics.flops` does not fit this model; None if it does."""
        has_attention = self.latent is not None or (self.kv_heads and self.head_dim)
        has_feed_forward = self.ffn or (self.moe is not None and all(self.moe.layers))
        is_known = self.family in GATED_FAMILIES or self.family in MIXTURES
        if not (is_known and self.heads and has_attention and has_feed_forward):
            return f"the FLOPs of a {self.family!r} model are unknown"
        return None


def read_causal_lm_dims(path: str | Path, *, trust_remote_code: bool = False) -> CausalLMDims:
    """Return the dimensions of a causal language model.

    Args:
        path: Model folder with a ``config.json``.
        trust_remote_code: Passed to transformers.

    Raises:
        ModelError: The folder has no readable ``config.json``, or this backend does not support the model.
    """
    content = read_config_json(path)
    check_not_quantized(content, path)
    hf = load_hf_config(path, trust_remote_code=trust_remote_code)
    _check_is_causal_lm(hf, path, trust_remote_code=trust_remote_code)
    text = hf.get_text_config(decoder=True)
    _check_is_trained_whole(hf, text, path)
    _check_stored_as_trained((hf.model_type, text.model_type), path)
    vocab_size = _number(text, "vocab_size")
    if not vocab_size:
        raise ModelError(
            f"{path}: config.json has no vocab_size; expected the number of rows of the output layer",
            path=Path(path),
            names=("vocab_size",),
        )
    heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
    kv_heads = _n_kv_heads(text, heads)
    head_dim = _number(text, "head_dim", "hidden_size_per_head") or (hidden // heads if heads else 0)
    return CausalLMDims(
        family=text.model_type,
        layers=_number(text, "num_hidden_layers"),
        hidden=hidden,
        ffn=_number(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim if kv_heads else 0,
        vocab_size=vocab_size,
        max_positions=position_limit(text),
        cached_layers=_n_cached_layers(text),
        window=_window(text),
        moe=read_experts(text),
        latent=read_latent_attention(text),
    )


def _check_is_causal_lm(hf: PretrainedConfig, path: str | Path, *, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    has_own_class = trust_remote_code and "AutoModelForCausalLM" in (getattr(hf, "auto_map", None) or {})
    if hf.is_encoder_decoder or not (hf.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or has_own_class):
        raise ModelError(
            f"{path} is a {hf.model_type!r} model, which transformers does not load as a decoder with "
            "AutoModelForCausalLM",
            remedy="actor_rollout_ref.actor.strategy=fsdp needs a causal language model, such as Llama, Gemma or OPT "
            "(for code in the model folder set actor_rollout_ref.model.trust_remote_code=true)",
            path=Path(path),
            names=("model_type",),
        )


def _check_is_trained_whole(hf: PretrainedConfig, text: PretrainedConfig, path: str | Path) -> None:
    """Check that the model in training has all parts of the folder, so that a saved folder is complete."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    trained, stored = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf.model_type), hf.architectures or []
    if hf is text or not stored or trained is None or trained in stored:
        return
    raise ModelError(
        f"{path} has a {stored[0]}, of which transformers trains the text model {trained} only; a folder that is saved "
        "after the training would lack the other parts",
        remedy="train a folder of the text model; docs/models.md has the program that saves one",
        path=Path(path),
        names=("architectures",),
    )


def _check_stored_as_trained(model_types: tuple[str, ...], path: str | Path) -> None:
    """Check that no tensor of the folder becomes several of the model, so that each can be exported by itself."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    for model_type in model_types:
        steps = get_checkpoint_conversion_mapping(model_type) or ()
        if any(isinstance(step, WeightConverter) and len(step.target_patterns) > 1 for step in steps):
            raise ModelError(
                f"{path} is a {model_type!r} model: transformers splits its stored weights when it loads them, so "
                "actor_rollout_ref.actor.strategy=fsdp cannot send them to the rollout engine",
                remedy="choose another model",
                path=Path(path),
                names=("model_type",),
            )


def config_value(text: PretrainedConfig, name: str) -> Any:
    """Return a value of a configuration, None without one; a list of the values of all layers if they can differ."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers raises it for a value that differs between layers
        return [getattr(text.per_layer_config[layer], name) for layer in range(text.num_hidden_layers)]


def _number(text: PretrainedConfig, *names: str) -> int:
    """Return the first of the named values that is a positive integer; 0 without one.

    Of a value that differs between layers, take that of the first layer which attends to all tokens.
    """
    for name in names:
        value = config_value(text, name)
        if isinstance(value, list):
            kinds = _layer_kinds(text)
            value = value[kinds.index(FULL_ATTENTION) if FULL_ATTENTION in kinds else 0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _n_kv_heads(text: PretrainedConfig, heads: int) -> int:
    """Return the number of key/value heads; 0 if keys and values are stored in another form."""
    if _number(text, "kv_lora_rank"):  # multi-head latent attention
        return 0
    # As in vLLM's FalconModelArchConfigConvertor: a Falcon model of the new architecture ignores multi_query.
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return _number(text, "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num") or heads


def _layer_kinds(text: PretrainedConfig) -> list[str]:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    return [str(kind) for kind in kinds]


def _n_cached_layers(text: PretrainedConfig) -> int:
    if kinds := _layer_kinds(text):
        own = kinds[: len(kinds) - _number(text, "num_kv_shared_layers")]
        return sum(kind in (FULL_ATTENTION, "attention") for kind in own)
    return 0 if _window(text) else _number(text, "num_hidden_layers")


def _window(text: PretrainedConfig) -> int:
    kinds = _layer_kinds(text)
    return 0 if kinds and "sliding_attention" not in kinds else _number(text, "sliding_window")
