"""Table of a model's weights: Hugging Face names and shapes, the Megatron name, and the sharding.

Loading, export to the rollout workers and saving a Hugging Face folder use the same table in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.student_dims import MoEConfig

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


class ShardSpec(Enum):
    """Sharding of a weight in its tensor-parallel group; :mod:`~recipe_gkd.actor.megatron.hf_layout` implements it.

    The group of an expert's weight is the expert tensor-parallel group.

    Attributes:
        NONE: Replicated on every rank.
        VOCAB: Divided by rows, after the vocabulary is padded.
        ROWS: Divided by rows (dimension 0). Only factors of adapters; see :mod:`~recipe_gkd.actor.megatron.lora_table`.
        COLUMNS: Weight [out, in], divided by columns (dimension 1).
        QKV: Three Hugging Face tensors in one parameter, interleaved by key/value group: the queries of the group, its
            key, its value. Divided by groups.
        GATE_UP: Two Hugging Face tensors in one parameter. Each rank has its rows of gate, then its rows of up.
    """

    NONE = auto()
    VOCAB = auto()
    ROWS = auto()
    COLUMNS = auto()
    QKV = auto()
    GATE_UP = auto()


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter, which holds one, two or three Hugging Face tensors.

    Attributes:
        hf: Hugging Face names and full shapes.
        mcore: Alternative Megatron names, relative to the layer, or to the model chunk outside of the layers. The
            second name is Transformer Engine's, which merges a norm into the next linear layer and the experts
            of a rank into one module. In an expert's weight, ``{}`` stands for the index of the expert on its rank.
        shard_spec: Sharding.
        layer: Global layer index; None outside of the layers.
        expert: Global expert index; None outside of the experts.
    """

    hf: tuple[tuple[str, tuple[int, ...]], ...]
    mcore: tuple[str, ...]
    shard_spec: ShardSpec
    layer: int | None
    expert: int | None = None


def weights(dims: ModelDims) -> Iterator[Weight]:
    """Yield all weights of a model in the order of the forward pass. A tied output layer is not included."""
    vocab = (dims.vocab_size, dims.hidden)
    yield Weight((("model.embed_tokens.weight", vocab),), (EMBEDDING,), ShardSpec.VOCAB, None)
    for layer in range(dims.layers):
        yield from _layer_weights(dims, layer)
    yield Weight((("model.norm.weight", (dims.hidden,)),), ("decoder.final_layernorm.weight",), ShardSpec.NONE, None)
    if not dims.tied:
        yield Weight((("lm_head.weight", vocab),), (OUTPUT,), ShardSpec.VOCAB, None)


def _layer_weights(dims: ModelDims, layer: int) -> Iterator[Weight]:
    weight = partial(_weight, layer)
    hidden, head = dims.hidden, dims.head_dim
    q, kv = dims.heads * head, dims.kv_heads * head

    yield weight(
        ShardSpec.NONE,
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        {"input_layernorm.weight": (hidden,)},
    )
    for kind, tail in (("weight", (hidden,)), ("bias", ())) if dims.qkv_bias else (("weight", (hidden,)),):
        yield weight(
            ShardSpec.QKV,
            (f"self_attention.linear_qkv.{kind}",),
            {f"self_attn.{name}_proj.{kind}": (rows, *tail) for name, rows in (("q", q), ("k", kv), ("v", kv))},
        )
    if dims.qk_norm:
        yield weight(ShardSpec.NONE, ("self_attention.q_layernorm.weight",), {"self_attn.q_norm.weight": (head,)})
        yield weight(ShardSpec.NONE, ("self_attention.k_layernorm.weight",), {"self_attn.k_norm.weight": (head,)})
    yield weight(ShardSpec.COLUMNS, ("self_attention.linear_proj.weight",), {"self_attn.o_proj.weight": (hidden, q)})
    yield weight(
        ShardSpec.NONE,
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        {"post_attention_layernorm.weight": (hidden,)},
    )
    if dims.moe is not None and dims.moe.layers[layer]:
        yield from _moe_weights(dims, dims.moe, layer)
    else:
        yield from _mlp_weights(layer, "mlp", MLP_NAMES, ("mlp.{}.weight",), (hidden, dims.ffn))


def _moe_weights(dims: ModelDims, moe: MoEConfig, layer: int) -> Iterator[Weight]:
    hidden = dims.hidden
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if dims.family == "mixtral" else ("mlp", MLP_NAMES)
    yield _weight(layer, ShardSpec.NONE, ("mlp.router.weight",), {f"{block}.gate.weight": (moe.experts, hidden)})
    if moe.shared_ffn is not None:
        gate = {f"{block}.shared_expert_gate.weight": (1, hidden)}
        yield _weight(layer, ShardSpec.NONE, ("mlp.shared_experts.gate_weight",), gate)
        yield from _mlp_weights(
            layer, f"{block}.shared_expert", names, ("mlp.shared_experts.{}.weight",), (hidden, moe.shared_ffn)
        )
    mcore = ("mlp.experts.local_experts.{{}}.{}.weight", "mlp.experts.{}.weight{{}}")
    for expert in range(moe.experts):
        yield from _mlp_weights(layer, f"{block}.experts.{expert}", names, mcore, (hidden, moe.ffn), expert)


def _mlp_weights(
    layer: int,
    prefix: str,
    names: tuple[str, str, str],
    mcore: tuple[str, ...],
    size: tuple[int, int],
    expert: int | None = None,
) -> Iterator[Weight]:
    """Yield the weights of one gated feed-forward block.

    Args:
        layer: Global layer index.
        prefix: Common prefix of the Hugging Face names.
        names: Hugging Face names of gate, up and down.
        mcore: Alternative Megatron names; ``{}`` stands for ``linear_fc1`` or ``linear_fc2``.
        size: Hidden size and feed-forward columns.
        expert: Global expert index, if the block is an expert.
    """
    hidden, ffn = size
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    fc1, fc2 = (tuple(name.format(f"linear_{fc}") for name in mcore) for fc in ("fc1", "fc2"))
    yield _weight(layer, ShardSpec.GATE_UP, fc1, {gate: (ffn, hidden), up: (ffn, hidden)}, expert)
    yield _weight(layer, ShardSpec.COLUMNS, fc2, {down: (hidden, ffn)}, expert)


def _weight(
    layer: int,
    shard_spec: ShardSpec,
    mcore: tuple[str, ...],
    hf: Mapping[str, tuple[int, ...]],
    expert: int | None = None,
) -> Weight:
    named = tuple((f"model.layers.{layer}.{name}", size) for name, size in hf.items())
    return Weight(named, mcore, shard_spec, layer, expert)
