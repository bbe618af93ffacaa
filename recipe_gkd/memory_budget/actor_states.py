"""Sizes of the weights, gradients and optimizer state of an actor rank, from the dimensions of the student.

Bytes per parameter, with AdamW, whose two moments are float32:

======================== ======= ========= =======================================================
Backend                  Weights Gradients Optimizer state
======================== ======= ========= =======================================================
Megatron, bfloat16       2       4         12, with a float32 copy of the weights
Megatron, float32        4       4         8
FSDP, any ``dtype``      4       4         8
frozen under LoRA        2 or 4  0         0
======================== ======= ========= =======================================================

With ``grad_reduce_in_fp32=false`` Megatron's gradients have the data type of the weights. The optimizer step then needs
float32 copies of them (:func:`has_gradient_copies`), which are not counted here.

Megatron's distributed optimizer divides the optimizer state among the data-parallel ranks. FSDP divides everything
among the ranks that share a copy of the model. No weight is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.megatron.hf_layout import shard_size
from recipe_gkd.actor.megatron.hf_names import EMBEDDING, Weight, weights
from recipe_gkd.actor.megatron.layout_checks import UNEQUAL_STAGES
from recipe_gkd.actor.megatron.lora_table import AdaptedWeight, adapted_weights
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.student_dims import load_hf_config
from recipe_gkd.config.conditions import sends_adapters
from recipe_gkd.config.schema import ActorConfig, Config, FsdpConfig, MegatronConfig
from recipe_gkd.config.schema.actor import ActorState

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Size of a number by the name of its data type."""
_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32

States = Mapping[ActorState, float]
"""Bytes of each state on one rank."""


@dataclass(frozen=True, kw_only=True)
class ActorMemory:
    """Sizes of the student in training.

    Attributes:
        stages: States of a rank of each pipeline stage; one entry without pipeline parallelism.
        n_weights: Number of parameters of the whole student, as a rollout engine loads it.
        n_adapters: Number of parameters of all its adapters.
    """

    stages: Sequence[States]
    n_weights: int
    n_adapters: int = 0


def read_actor_memory(config: Config) -> ActorMemory:
    """Return the sizes of the configured student.

    Raises:
        ModelError: The student's ``config.json`` cannot be read or is not supported.
        ConfigError: ``lora.target_modules`` names no layer of the student.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    world_size = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if actor.strategy == "megatron":
        dims = read_model_dims(model.path, trust_remote_code=model.trust_remote_code)
        n_weights = sum(math.prod(shape) for weight in weights(dims) for _, shape in weight.new_tensors)
        adapted = adapted_weights(dims, actor.lora)
        stages = megatron_states(dims, actor.megatron, world_size, adapted)
        n_adapters = sum(math.prod(shape) for factor in _factors(adapted) for _, shape in factor.new_tensors)
        return ActorMemory(stages=stages, n_weights=n_weights, n_adapters=n_adapters)
    base, adapters = _fsdp_parameters(config)
    states = fsdp_states(base, adapters, actor, world_size)
    n_weights, n_adapters = (sum(math.prod(shape) for shape in shapes) for shapes in (base, adapters))
    return ActorMemory(stages=[states], n_weights=n_weights, n_adapters=n_adapters)


def sync_bytes(config: Config, actor: ActorMemory) -> int:
    """Return the bytes that a weight sync sends to each rollout worker."""
    n_sent = actor.n_adapters if sends_adapters(config) else actor.n_weights
    return n_sent * ITEM_BYTES[config.actor_rollout_ref.actor.dtype]


def megatron_states(
    dims: ModelDims, megatron: MegatronConfig, world_size: int, adapted: Sequence[AdaptedWeight] = ()
) -> list[States]:
    """Return the states of a rank of each pipeline stage.

    If an override gives the stages different numbers of layers, the mean of all stages is returned as one entry. The
    largest stage is not smaller.

    Args:
        megatron: Parallel layout and data type.
        world_size: Number of actor ranks.
        adapted: Weights with adapters. If there are any, all other parameters are frozen.
    """
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tp
    is_divided = megatron.use_distributed_optimizer
    shared_by = world_size / (tp * pp) if is_divided else 1.0
    experts_shared_by = world_size / (etp * ep * pp) if is_divided else 1.0
    item = ITEM_BYTES[megatron.dtype]
    moments = _MOMENTS + (_FLOAT32 if item < _FLOAT32 else 0)
    stages: list[States] = []
    bases, adapters = (_stage_parameters(dims, megatron, table) for table in (weights(dims), _factors(adapted)))
    for base, own in zip(bases, adapters, strict=True):
        dense, experts = own if adapted else base
        stages.append(
            {
                "params": item * (base.dense + base.experts / ep + own.dense),
                "grads": (_FLOAT32 if _reduces_in_float32(megatron) else item) * (dense + experts / ep),
                "optimizer": moments * (dense / shared_by + experts / ep / experts_shared_by),
            }
        )
    if UNEQUAL_STAGES & megatron.override_transformer_config.keys():
        return [_mean(stages)]
    return stages


def has_gradient_copies(actor: ActorConfig) -> bool:
    """Return True if the optimizer step needs float32 copies of 16-bit gradients, divided like the moments."""
    is_16_bit = actor.strategy == "megatron" and ITEM_BYTES[actor.dtype] < _FLOAT32
    return is_16_bit and not _reduces_in_float32(actor.megatron)


def _reduces_in_float32(megatron: MegatronConfig) -> bool:
    return bool(megatron.override_ddp_config.get("grad_reduce_in_fp32", True))


def _factors(adapted: Sequence[AdaptedWeight]) -> list[Weight]:
    return [factor for weight in adapted for pair in weight.factors for factor in pair]


def fsdp_states(
    base: Iterable[Sequence[int]], adapters: Iterable[Sequence[int]], actor: ActorConfig, world_size: int
) -> States:
    """Return the states of the rank with the most rows.

    Args:
        base: Shapes of the parameters of the model, each tied one once.
        adapters: Shapes of the adapters. If there are any, all other parameters are frozen.
        actor: Sharding and data types.
        world_size: Number of actor ranks.
    """
    fsdp = actor.fsdp_config
    n_base, n_adapters = (sum(_shard(shape, fsdp, world_size) for shape in shapes) for shapes in (base, adapters))
    is_frozen = n_adapters > 0
    n_trained = n_adapters if is_frozen else n_base
    return {
        "params": n_base * (ITEM_BYTES[fsdp.dtype] if is_frozen else _FLOAT32) + n_adapters * _FLOAT32,
        "grads": n_trained * _FLOAT32,
        "optimizer": n_trained * _MOMENTS,
    }


def _shard(shape: Sequence[int], fsdp: FsdpConfig, world_size: int) -> int:
    """Return the numbers of a parameter on rank 0. FSDP divides dimension 0, and pads the last shard."""
    n_shards = world_size if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    return -(-shape[0] // n_shards) * math.prod(shape[1:]) if shape else 1


def _fsdp_parameters(config: Config) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of the parameters of the model, and of the adapters. Builds the model without data."""
    import torch
    from transformers import AutoModelForCausalLM

    from recipe_gkd.actor.fsdp.lora import add_adapters

    student, lora = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.lora
    hf = load_hf_config(student.path, trust_remote_code=student.trust_remote_code)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(hf, trust_remote_code=student.trust_remote_code)
    base = [tuple(parameter.shape) for parameter in module.parameters()]
    module.requires_grad_(True)
    if not lora.rank:
        return base, []
    add_adapters(module, lora)
    return base, [tuple(parameter.shape) for parameter in module.parameters() if parameter.requires_grad]


class _Parameters(NamedTuple):
    """Numbers of parameters of a pipeline stage: dense ones of a rank, and the shards of all experts."""

    dense: int
    experts: int


def _stage_parameters(dims: ModelDims, megatron: MegatronConfig, table: Iterable[Weight]) -> list[_Parameters]:
    """Return the numbers of parameters of each pipeline stage.

    Args:
        table: Weights to count.
    """
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    n_chunks = pp * (megatron.virtual_pipeline_model_parallel_size or 1)
    counts = [[0, 0] for _ in range(pp)]
    for weight in table:
        is_expert = weight.expert is not None
        size = math.prod(shard_size(weight, dims, etp if is_expert else tp))
        for stage in _stages_of(weight, dims, pp, n_chunks):
            counts[stage][is_expert] += size
    return [_Parameters(dense, experts) for dense, experts in counts]


def _stages_of(weight: Weight, dims: ModelDims, pp: int, n_chunks: int) -> set[int]:
    """Return the pipeline stages that hold a weight. Chunks of layers are assigned to the stages in turn."""
    if weight.layer is not None:
        return {weight.layer * n_chunks // dims.layers % pp}
    if weight.mcore == (EMBEDDING,):
        return {0, pp - 1} if dims.tied else {0}
    return {pp - 1}


def _mean(stages: Sequence[States]) -> States:
    return {state: sum(stage[state] for stage in stages) / len(stages) for state in stages[0]}
