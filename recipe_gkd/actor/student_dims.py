"""Dimensions of the student that the driver needs, for both training backends.

This module imports transformers only when it reads a folder, so that the driver rejects an unsuitable model before it
starts a worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recipe_gkd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture-of-experts part of a model.

    Attributes:
        layers: One entry per layer: True for a mixture-of-experts layer, False for a dense layer.
        experts: Number of experts per layer.
        top_k: Number of experts per token.
        ffn: Feed-forward columns of one expert.
        normalized: If true, the router weights of a token's experts sum to 1.
        shared_ffn: Feed-forward columns of the shared experts together; None without shared experts.
        shared_gate: If true, the output of the shared expert is multiplied by a gate.
        score: Function of the router's logits.
        score_bias: If true, a correction is added to the scores for the choice of experts only.
        groups: Number of groups of experts, and number of groups of which a token's experts are chosen; None if they
            are chosen from all experts.
        scale: Factor of the router weights.
    """

    layers: tuple[bool, ...]
    experts: int
    top_k: int
    ffn: int
    normalized: bool
    shared_ffn: int | None
    shared_gate: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_bias: bool = False
    groups: tuple[int, int] | None = None
    scale: float = 1.0

    @property
    def corrects_softmax(self) -> bool:
        """True if the correction is added to softmax scores."""
        return self.score_bias and self.score == "softmax"


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        q_rank: Width of the compressed queries; None if queries are not compressed.
        kv_rank: Width of the compressed keys and values.
        nope: Channels of a query or key without position.
        rope: Channels of a query or key with position; the key's are shared by all heads.
        value: Channels of a value.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        """Channels of a query or key."""
        return self.nope + self.rope


@dataclass(frozen=True, kw_only=True)
class StudentDims:
    """Dimensions by which the driver checks the rollout engine and counts FLOPs.

    A dimension that an architecture does not have, or names in an unknown way, is 0.

    Attributes:
        layers: Number of transformer layers.
        hidden: Width of the residual stream.
        ffn: Feed-forward columns of a dense layer.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        head_dim: Width of one head.
        vocab_size: Rows of the output layer in the Hugging Face folder.
        max_positions: Maximum sequence length.
        moe: Mixture-of-experts part; None if all layers are dense.
        latent: Multi-head latent attention, with which ``kv_heads`` and ``head_dim`` are 0; None for usual heads.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    moe: MoEConfig | None = None
    latent: LatentAttention | None = None

    @property
    def query_dim(self) -> int:
        """Width of a query or key."""
        return self.latent.query if self.latent else self.head_dim

    @property
    def n_key_heads(self) -> int:
        """Number of keys of a token in the attention of a layer."""
        return self.heads if self.latent else self.kv_heads

    def windows(self) -> list[int | None]:
        """Return the number of last keys that a query attends to in each layer, its own included; None for all."""
        return [None] * self.layers

    def n_cached_layers(self) -> int:
        """Return the number of layers that keep the keys and values of all tokens of a sequence."""
        return self.layers

    def cached_numbers(self, tp_size: int = 1) -> int:
        """Return how many numbers per token an engine's rank keeps in its KV cache; 0 if unknown or without growth.

        Args:
            tp_size: Tensor-parallel size of the engine. Latent keys and values are not divided.
        """
        if self.latent is not None:
            return self.n_cached_layers() * (self.latent.kv_rank + self.latent.rope)
        heads = max(1, self.kv_heads // tp_size) if self.kv_heads else 0
        return 2 * self.n_cached_layers() * heads * self.head_dim

    def flops_problem(self) -> str | None:
        """Return why :mod:`recipe_gkd.metrics.flops` does not fit this model; None if it does."""
        return None


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Return the content of ``config.json`` of a model folder.

    Raises:
        ModelError: The file is missing or is no JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(
            f"no config.json in {path}",
            remedy="actor_rollout_ref.model.path must be a Hugging Face model folder",
            path=file,
        )
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(content, dict):
        raise _unreadable(file, TypeError(f"got a {type(content).__name__} instead of an object"))
    return content


def check_not_quantized(content: Mapping[str, Any], path: str | Path) -> None:
    """Check that the weights of a model folder are numbers of 16 or 32 bits.

    Args:
        content: Content of ``config.json``.
        path: Model folder.

    Raises:
        ModelError: They are quantized.
    """
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    for part in parts:
        for name in ("quantization_config", "compression_config"):
            if not (found := part.get(name)):
                continue
            method = found.get("quant_method") if isinstance(found, dict) else found
            raise ModelError(
                f"{path} has quantized weights (quant_method={method} in config.json), which cannot be trained",
                remedy="use the model's folder with bfloat16 or float32 weights",
                path=Path(path),
                names=(name,),
            )


def load_hf_config(path: str | Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return the configuration of a model folder as transformers reads it.

    Args:
        path: Model folder.
        trust_remote_code: Allow code from the folder.

    Raises:
        ModelError: transformers rejects the file, or does not support its ``model_type``.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, AttributeError, ImportError, StrictDataclassError) as error:
        raise _unreadable(Path(path) / "config.json", error) from error


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{file} cannot be read ({type(error).__name__}: {' '.join(str(error).split())})",
        remedy="expected a file written by save_pretrained",
        path=file,
    )
