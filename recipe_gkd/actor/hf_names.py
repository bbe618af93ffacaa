"""Every weight of a model: its Hugging Face names and shapes, its name in Megatron, and how tensor parallelism cuts it.

One list in one order serves loading, exporting to the rollout workers, and saving a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from recipe_gkd.actor.model_dims import ModelDims, MoEConfig


class ShardSpec(Enum):
    """How the ranks of a tensor-parallel group divide a weight; :mod:`~recipe_gkd.actor.hf_layout` does it.

    The group is that of the model, or for an expert's weight that of the expert.
    """

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
    which merges a norm into the linear layer that follows, and a rank's experts into one module. For an expert, `{}`
    stands for its number among those of the rank."""
    cut: ShardSpec
    layer: int | None
    """Global layer number; None outside the layers."""
    expert: int | None = None
    """Global number of the expert that it belongs to; None outside the experts."""


def weights(shape: ModelDims) -> Iterator[Weight]:
    """All of them, in the order of the forward pass. A tied output layer is not one."""
    vocab = (shape.vocab_size, shape.hidden)
    yield Weight((("model.embed_tokens.weight", vocab),), (EMBEDDING,), ShardSpec.VOCAB, None)
    for layer in range(shape.layers):
        yield from _layer_weights(shape, layer)
    yield Weight((("model.norm.weight", (shape.hidden,)),), ("decoder.final_layernorm.weight",), ShardSpec.NONE, None)
    if not shape.tied:
        yield Weight((("lm_head.weight", vocab),), (OUTPUT,), ShardSpec.VOCAB, None)


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def _layer_weights(shape: ModelDims, layer: int) -> Iterator[Weight]:
    weight = partial(_weight, layer)
    hidden, head = shape.hidden, shape.head_dim
    q, kv = shape.heads * head, shape.kv_heads * head

    yield weight(
        ShardSpec.NONE,
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        {"input_layernorm.weight": (hidden,)},
    )
    for kind, tail in (("weight", (hidden,)), ("bias", ())) if shape.qkv_bias else (("weight", (hidden,)),):
        yield weight(
            ShardSpec.QKV,
            (f"self_attention.linear_qkv.{kind}",),
            {f"self_attn.{name}_proj.{kind}": (rows, *tail) for name, rows in (("q", q), ("k", kv), ("v", kv))},
        )
    if shape.qk_norm:
        yield weight(ShardSpec.NONE, ("self_attention.q_layernorm.weight",), {"self_attn.q_norm.weight": (head,)})
        yield weight(ShardSpec.NONE, ("self_attention.k_layernorm.weight",), {"self_attn.k_norm.weight": (head,)})
    yield weight(ShardSpec.COLUMNS, ("self_attention.linear_proj.weight",), {"self_attn.o_proj.weight": (hidden, q)})
    yield weight(
        ShardSpec.NONE,
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        {"post_attention_layernorm.weight": (hidden,)},
    )
    if shape.mixture is not None and shape.mixture.layers[layer]:
        yield from _mixture_weights(shape, shape.mixture, layer)
    else:
        yield from _mlp_weights(layer, "mlp", MLP_NAMES, ("mlp.{}.weight",), hidden, shape.ffn)


def _mixture_weights(shape: ModelDims, mixture: MoEConfig, layer: int) -> Iterator[Weight]:
    hidden = shape.hidden
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if shape.family == "mixtral" else ("mlp", MLP_NAMES)
    yield _weight(layer, ShardSpec.NONE, ("mlp.router.weight",), {f"{block}.gate.weight": (mixture.experts, hidden)})
    if mixture.shared_ffn is not None:
        gate = {f"{block}.shared_expert_gate.weight": (1, hidden)}
        yield _weight(layer, ShardSpec.NONE, ("mlp.shared_experts.gate_weight",), gate)
        yield from _mlp_weights(
            layer, f"{block}.shared_expert", names, ("mlp.shared_experts.{}.weight",), hidden, mixture.shared_ffn
        )
    of_expert = ("mlp.experts.local_experts.{{}}.{}.weight", "mlp.experts.{}.weight{{}}")
    for expert in range(mixture.experts):
        yield from _mlp_weights(
            layer, f"{block}.experts.{expert}", names, of_expert, hidden, mixture.ffn, expert=expert
        )


def _mlp_weights(
    layer: int, prefix: str, names: tuple[str, str, str], mcore: tuple[str, ...], hidden: int, ffn: int,
    expert: int | None = None,
) -> Iterator[Weight]:  # fmt: skip
    """``names`` of gate, up and down after ``prefix``; in ``mcore`` `{}` stands for Megatron's name of the layer."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    fc1, fc2 = (tuple(name.format(f"linear_{fc}") for name in mcore) for fc in ("fc1", "fc2"))
    yield _weight(layer, ShardSpec.GATE_UP, fc1, {gate: (ffn, hidden), up: (ffn, hidden)}, expert)
    yield _weight(layer, ShardSpec.COLUMNS, fc2, {down: (hidden, ffn)}, expert)


def _weight(
    layer: int, cut: ShardSpec, mcore: tuple[str, ...], hf: Mapping[str, tuple[int, ...]], expert: int | None = None
) -> Weight:
    named = tuple((f"model.layers.{layer}.{name}", size) for name, size in hf.items())
    return Weight(named, mcore, cut, layer, expert)
