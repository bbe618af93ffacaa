"""Dimensions of a Hugging Face model that the Megatron backend trains.

This module imports no Megatron, and imports transformers only when it reads a folder. The driver therefore rejects an
unsupported model before it starts a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recipe_gkd.actor.student_dims import StudentDims

# The embedding is padded to a multiple of this number. The padded size is then the same for every tensor-parallel size
# that divides it, and a checkpoint can be loaded with another tensor-parallel size.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of some layers.

    Attributes:
        width: Number of rotated channels of a head, the first ones.
        theta: Base of the frequencies.
        scaling: ``rope_parameters`` of transformers with ``rope_type``; empty without scaling.
        max_positions: ``max_position_embeddings``, which some scalings use.
        interleaved: If true, channels 2 i and 2 i + 1 form a pair; otherwise channels i and i + width / 2.
    """

    width: int
    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    max_positions: int = 0
    interleaved: bool = False


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer.

    Attributes:
        rope: Index in ``ModelDims.ropes``; None if the layer has no position embedding.
        window: Number of last keys that a query attends to, its own included; None for all.
    """

    rope: int | None = 0
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDims(StudentDims):
    """Dimensions needed to build a model and to convert its weights, in addition to :class:`StudentDims`.

    Attributes:
        family: ``model_type``, a key of :data:`~recipe_gkd.actor.megatron.families.FAMILIES`.
        tied: If true, the output layer shares the weights of the embedding.
        norm_eps: Epsilon of RMSNorm.
        ropes: Position embeddings.
        attention: Attention of each layer; empty if all layers have the first position embedding and no window.
        qkv_bias: If true, the query, key and value projections have biases.
        qk_norm: ``head`` if queries and keys are normalized per head, ``all_heads`` if all heads together.
        softmax_scale: Factor of the attention scores; None for 1 / sqrt(width of a query).
        norms: Norms of a layer: ``before`` attention and feed-forward block, ``after`` them, or ``both``.
        norm_offset: If true, a norm multiplies by 1 + weight.
        activation: Activation of the gated feed-forward blocks.
        gate_limit: Bound of the inputs of the activation and, with both signs, of the other half; None for none.
        up_offset: What is added to the half that the activation is multiplied by.
        linear_bias: If true, all projections, experts and routers have biases.
        sinks: If true, each head has one more score, which belongs to no key.
        embedding_scale: Factor of the embeddings.
    """

    family: str
    tied: bool
    norm_eps: float
    ropes: tuple[Rope, ...]
    attention: tuple[LayerAttention, ...] = ()
    qkv_bias: bool = False
    qk_norm: Literal["head", "all_heads"] | None = None
    softmax_scale: float | None = None
    norms: Literal["before", "after", "both"] = "before"
    norm_offset: bool = False
    activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    gate_limit: float | None = None
    up_offset: float = 0.0
    linear_bias: bool = False
    sinks: bool = False
    embedding_scale: float = 1.0

    @property
    def needs_local_layers(self) -> str:
        """Feature that Transformer Engine's layers are not used for; empty if they compute this model."""
        features = {
            "windows or layers without rotary embedding": bool(self.attention),
            "multi-head latent attention": self.latent is not None,
            "a norm behind attention or feed-forward block": self.norms != "before",
            "a norm of all heads": self.qk_norm == "all_heads",
            "rotation of a part of the channels, or of neighbors": any(
                rope.interleaved or rope.width != self.query_dim for rope in self.ropes
            ),
            "an activation other than SiLU": self.activation != "silu",
            "a correction of the router's scores": self.moe is not None and self.moe.score_bias,
            "attention sinks": self.sinks,
            "biases of experts": self.moe is not None and self.linear_bias,
        }
        return next((name for name, found in features.items() if found), "")

    def attention_of(self, layer: int) -> LayerAttention:
        """Return the attention of a layer."""
        return self.attention[layer] if self.attention else LayerAttention()

    def padded_vocab(self, tp_size: int) -> int:
        """Return the rows of Megatron's embedding: ``vocab_size`` rounded up so that ``tp_size`` divides it."""
        multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp_size == 0 else VOCAB_MULTIPLE * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def windows(self) -> list[int | None]:
        """Return the number of last keys that a query attends to in each layer, its own included; None for all."""
        return [self.attention_of(layer).window for layer in range(self.layers)]

    def n_cached_layers(self) -> int:
        """Return the number of layers that keep the keys and values of all tokens of a sequence."""
        return self.windows().count(None)
