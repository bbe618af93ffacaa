"""Table of a model's weights: Hugging Face names and shapes, the Megatron name, and the sharding.

Loading, export to the rollout workers and saving a Hugging Face folder use the same table in the same order. It is made
from the description of the model's family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipe_gkd.actor.megatron.families import FAMILIES
from recipe_gkd.actor.megatron.families.family import Part, ShardSpec, Stack, WeightRule, sizes
from recipe_gkd.actor.megatron.model_dims import ModelDims

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
EXPERT = "[]"
"""Place of the index of an expert on its rank in a Megatron name."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRows:
    """Rows of a Hugging Face tensor that are a part of a Megatron parameter.

    Attributes:
        name: Name of the tensor.
        first: Index of the first row.
        shape: Shape of the part.
    """

    name: str
    first: int
    shape: Shape


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter, which holds one, two or three Hugging Face tensors, or one expert's part of a tensor.

    Attributes:
        hf: Hugging Face names and full shapes. Each expert's weight has the same tensor if it is a stack.
        mcore: Alternative Megatron names, relative to the layer, or to the model chunk outside of the layers. The
            second name is Transformer Engine's, which merges a norm into the next linear layer and the experts
            of a rank into one module. In an expert's weight, :data:`EXPERT` stands for the index of the expert on its
            rank.
        shard_spec: Sharding.
        layer: Global layer index; None outside of the layers.
        expert: Global expert index; None outside of the experts.
        parts: Rows of the Hugging Face tensors in the order of the parameter. Of a stack, the shape is that of the
            expert's row without its first dimension.
        stack: Form of a tensor with this weight of all experts; None if it is the only weight in its tensors.
        is_float32: True for a float32 buffer.
    """

    hf: tuple[tuple[str, Shape], ...]
    mcore: tuple[str, ...]
    shard_spec: ShardSpec
    layer: int | None
    expert: int | None = None
    parts: tuple[TensorRows, ...] = ()
    stack: Stack | None = None
    is_float32: bool = False

    @property
    def new_tensors(self) -> tuple[tuple[str, Shape], ...]:
        """Tensors of ``hf`` that no earlier weight of the model has."""
        return () if self.stack is not None and self.expert else self.hf


def weights(dims: ModelDims) -> Iterator[Weight]:
    """Yield all weights of a model in the order of the forward pass. A tied output layer is not included."""
    vocab, norm = Part("lm_head.weight", "vocab hidden"), Part("model.norm.weight", "hidden")
    embedding = Part("model.embed_tokens.weight", "vocab hidden")
    size = sizes(dims) | {"vocab": dims.vocab_size}
    yield _weight(WeightRule((EMBEDDING,), ShardSpec.VOCAB, (embedding,)), size, None)
    rules = FAMILIES[dims.family].rules
    for layer in range(dims.layers):
        yield from _layer_weights(rules(dims, layer), size, layer)
    yield _weight(WeightRule(("decoder.final_layernorm.weight",), ShardSpec.NONE, (norm,)), size, None)
    if not dims.tied:
        yield _weight(WeightRule((OUTPUT,), ShardSpec.VOCAB, (vocab,)), size, None)


def _layer_weights(rules: tuple[WeightRule, ...], size: dict[str, int], layer: int) -> Iterator[Weight]:
    yield from (_weight(rule, size, layer) for rule in rules if not rule.of_experts)
    for rule in rules:  # the experts of a stack are consecutive
        if rule.stack is not None:
            yield from (_part_of_stack(rule, rule.stack, size, layer, expert) for expert in range(size["experts"]))
    of_experts = [rule for rule in rules if rule.of_experts and rule.stack is None]
    for expert in range(size["experts"] if of_experts else 0):
        yield from (_weight(rule, size, layer, expert) for rule in of_experts)


def _weight(rule: WeightRule, size: dict[str, int], layer: int | None, expert: int | None = None) -> Weight:
    prefix = "" if layer is None else f"model.layers.{layer}."
    parts: list[TensorRows] = []
    shapes: dict[str, Shape] = {}
    for part in rule.parts:
        name = prefix + (part.name if expert is None else part.name.format(expert))
        shape = tuple(size[dimension] for dimension in part.shape.split())
        before = shapes.get(name, (0,))[0]
        parts.append(TensorRows(name, before, shape))
        shapes[name] = (before + shape[0], *shape[1:])
    return Weight(
        tuple(shapes.items()), rule.mcore, rule.shard_spec, layer, expert, tuple(parts), is_float32=rule.is_float32
    )


def _part_of_stack(rule: WeightRule, stack: Stack, size: dict[str, int], layer: int, expert: int) -> Weight:
    [part] = rule.parts
    name, shape = f"model.layers.{layer}.{part.name}", tuple(size[dimension] for dimension in part.shape.split())
    whole = (name, (size["experts"], *shape))
    return Weight((whole,), rule.mcore, rule.shard_spec, layer, expert, (TensorRows(name, expert, shape),), stack)
