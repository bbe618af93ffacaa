"""Description of a model family: what its configuration means, and how its weights are named and divided.

A module of this package describes one or a few families with the building blocks of
:mod:`~recipe_gkd.actor.megatron.families.blocks`. Loading, export to the rollout workers, saved folders and the memory
plan all use the same description. docs/new_family.md shows how to add a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from recipe_gkd.actor.megatron.model_dims import ModelDims


class ShardSpec(Enum):
    """Sharding of a weight in its tensor-parallel group; :mod:`~recipe_gkd.actor.megatron.hf_layout` implements it.

    The group of an expert's weight is the expert tensor-parallel group.

    Attributes:
        NONE: Replicated on every rank.
        VOCAB: Divided by rows, after the vocabulary is padded.
        ROWS: Divided by rows (dimension 0).
        COLUMNS: Weight [out, in], divided by columns (dimension 1).
        QKV: Queries, keys and values in one parameter, interleaved by key/value group: the queries of the group, its
            key, its value. Divided by groups.
        GATE_UP: Gate and up in one parameter. Each rank has its rows of gate, then its rows of up.
    """

    NONE = auto()
    VOCAB = auto()
    ROWS = auto()
    COLUMNS = auto()
    QKV = auto()
    GATE_UP = auto()


@dataclass(frozen=True)
class Part:
    """Rows of a Hugging Face tensor.

    Attributes:
        name: Name of the tensor. In a layer it is relative to the layer, and ``{}`` stands for the index of an expert.
        shape: Names of its dimensions in :func:`sizes`, separated by spaces. Several parts with the same name are
            consecutive rows of one tensor.
    """

    name: str
    shape: str


@dataclass(frozen=True)
class Stack:
    """Form of a tensor of a folder that holds a weight of all experts of a layer. Its first dimension is the expert.

    Attributes:
        transposed: If true, it is a matrix that is stored as [in, out].
        interleaved: If true, outputs of gate and up alternate.
    """

    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter of a layer.

    Attributes:
        mcore: Alternative Megatron names, relative to the layer. The second name is Transformer Engine's, which merges
            a norm into the next linear layer and the experts of a rank into one module. ``[]`` stands for the index of
            an expert on its rank.
        shard_spec: Sharding.
        parts: Parts of Hugging Face tensors that the parameter holds.
        of_experts: If true, there is one such parameter for each expert.
        stack: Form of the tensor that has this weight of all experts; None if each expert has its own tensors. The
            shape of its only part is that of one expert in the tensor.
        is_float32: If true, it is a float32 buffer, which is not trained.
    """

    mcore: tuple[str, ...]
    shard_spec: ShardSpec
    parts: tuple[Part, ...]
    of_experts: bool = False
    stack: Stack | None = None
    is_float32: bool = False


WeightRules = tuple[WeightRule, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        model_type: ``model_type`` in ``config.json``.
        numbers: Returns the fields of :class:`~recipe_gkd.actor.megatron.model_dims.ModelDims` in which a model differs
            from Llama, from the configuration of transformers.
        rules: Returns the weights of a layer, in the order of the forward pass.
        required: Supported values of configuration fields, for fields with effects that are not implemented.
        problem: Returns why a configuration is not supported, with the names of the fields; None if it is.
        without_effect: Configuration fields that do not change a text model in training.
    """

    model_type: str
    numbers: Callable[[Any], dict[str, Any]]
    rules: Callable[[ModelDims, int], WeightRules]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    problem: Callable[[Any], tuple[str, tuple[str, ...]] | None] = lambda hf: None
    without_effect: frozenset[str] = frozenset()


def sizes(dims: ModelDims) -> dict[str, int]:
    """Return the dimensions of weights by name."""
    found = {
        "1": 1,
        "hidden": dims.hidden,
        "ffn": dims.ffn,
        "q": dims.heads * dims.head_dim,
        "kv": dims.kv_heads * dims.head_dim,
        "head": dims.head_dim,
        "heads": dims.heads,
    }
    if (moe := dims.moe) is not None:
        found |= {"experts": moe.experts, "expert_ffn": moe.ffn, "gate+up": 2 * moe.ffn}
        found["shared_ffn"] = moe.shared_ffn or 0
    if (latent := dims.latent) is not None:
        found |= {
            "q": dims.heads * latent.query,
            "q_rank": latent.q_rank or 0,
            "kv_rank": latent.kv_rank,
            "kv_rank+rope": latent.kv_rank + latent.rope,
            "k+v": dims.heads * (latent.nope + latent.value),
            "v": dims.heads * latent.value,
        }
    return found
