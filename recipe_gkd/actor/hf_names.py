"""Every weight of a model: its Hugging Face names and shapes, its name in Megatron, and how tensor parallelism cuts it.

One list in one order serves loading, exporting to the rollout workers, and saving a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from recipe_gkd.actor.shape import ModelShape


class Cut(Enum):
    """How the ranks of a tensor-parallel group divide a weight; :mod:`~recipe_gkd.actor.hf_layout` does it."""

    NONE = auto()
    """Every rank has all of it."""
    VOCAB = auto()
    """Rows, after padding the vocabulary."""
    COLUMNS = auto()
    """Columns (dimension 1) of a weight [out, in]."""
    QKV = auto()
    """Three Hugging Face tensors in one, interleaved by key/value group: q of the group, its k, its v."""
    GATE_UP = auto()
    """Two in one: each rank has its rows of the gate, then its rows of up."""


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter and the one, two or three Hugging Face tensors that it holds."""

    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and full shapes."""
    mcore: tuple[str, ...]
    """Its name in the model chunk, or in the layer for a layer's weight; then its other name with Transformer Engine,
    which merges a norm into the linear layer that follows."""
    cut: Cut
    layer: int | None
    """Global layer number; None outside the layers."""


def weights(shape: ModelShape) -> Iterator[Weight]:
    """All of them, in the order of the forward pass. A tied output layer is not one."""
    vocab = (shape.vocab_size, shape.hidden)
    yield Weight((("model.embed_tokens.weight", vocab),), (EMBEDDING,), Cut.VOCAB, None)
    for layer in range(shape.layers):
        yield from _layer_weights(shape, layer)
    yield Weight((("model.norm.weight", (shape.hidden,)),), ("decoder.final_layernorm.weight",), Cut.NONE, None)
    if not shape.tied:
        yield Weight((("lm_head.weight", vocab),), (OUTPUT,), Cut.VOCAB, None)


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def _layer_weights(shape: ModelShape, layer: int) -> Iterator[Weight]:
    def weight(cut: Cut, mcore: tuple[str, ...], **hf: tuple[int, ...]) -> Weight:
        names = ((f"model.layers.{layer}.{name.replace('__', '.')}", size) for name, size in hf.items())
        return Weight(tuple(names), mcore, cut, layer)

    hidden, ffn, head = shape.hidden, shape.ffn, shape.head_dim
    q, kv = shape.heads * head, shape.kv_heads * head

    yield weight(
        Cut.NONE,
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        input_layernorm__weight=(hidden,),
    )
    yield weight(
        Cut.QKV,
        ("self_attention.linear_qkv.weight",),
        self_attn__q_proj__weight=(q, hidden),
        self_attn__k_proj__weight=(kv, hidden),
        self_attn__v_proj__weight=(kv, hidden),
    )
    if shape.qkv_bias:
        yield weight(
            Cut.QKV,
            ("self_attention.linear_qkv.bias",),
            self_attn__q_proj__bias=(q,),
            self_attn__k_proj__bias=(kv,),
            self_attn__v_proj__bias=(kv,),
        )
    if shape.qk_norm:
        yield weight(Cut.NONE, ("self_attention.q_layernorm.weight",), self_attn__q_norm__weight=(head,))
        yield weight(Cut.NONE, ("self_attention.k_layernorm.weight",), self_attn__k_norm__weight=(head,))
    yield weight(Cut.COLUMNS, ("self_attention.linear_proj.weight",), self_attn__o_proj__weight=(hidden, q))
    yield weight(
        Cut.NONE,
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        post_attention_layernorm__weight=(hidden,),
    )
    yield weight(
        Cut.GATE_UP,
        ("mlp.linear_fc1.weight",),
        mlp__gate_proj__weight=(ffn, hidden),
        mlp__up_proj__weight=(ffn, hidden),
    )
    yield weight(Cut.COLUMNS, ("mlp.linear_fc2.weight",), mlp__down_proj__weight=(hidden, ffn))
