"""Memory of the activations and logits of a micro-batch on an actor rank.

Numbers that the backward pass keeps per token and layer, with H the hidden size, Q and G the widths of all query heads
and of all key (or value) heads, and F the feed-forward columns of a token:

=================== ===== ===== ===== =====
Layers              H     Q     G     F
=================== ===== ===== ===== =====
Transformer Engine  4     2     2     3
torch (`local`)     5     4     3     3
the same on a CPU   5     4     3     4
transformers (FSDP) 5     4     2     4
=================== ===== ===== ===== =====

Models with experts have 5 F in both kinds of Megatron's layers, because they use its own activation.

The last two rows were measured on a CPU in float32, the second and the last on an H200 in bfloat16. The backward pass
of a layer holds another 6 H per token. With recomputation the inputs of all layers and the activations of one remain.
A pipeline stage stores activations for each micro-batch in flight. The layer that is recomputed, what a backward pass
holds, and the logits exist for one micro-batch at a time. The logits of the Megatron backend exist once, because their
gradient is written over them; with FSDP they exist twice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.megatron.transformer_impl import impl_setting
from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.config.schema import Config, MegatronConfig
from recipe_gkd.losses.fused_head import BLOCK_BYTES
from recipe_gkd.memory_budget.actor_states import ITEM_BYTES
from teacher.common.head_dtype import wants_float32_head

_TRANSFORMER_ENGINE, _TRANSFORMERS = (4, 2, 2, 3), (5, 4, 2, 4)
_LOCAL = {"cuda": (5, 4, 3, 3), "cpu": (5, 4, 3, 4)}
_FFN_OF_MEGATRON = 5
"""Numbers per token and column that ``silu(gate) * (up + 0)`` and the next layer keep."""
_BACKWARD_OF_LAYER = 6
"""Multiples of H that the backward pass of one layer holds per token."""
_TEACHER_ENTRY_BYTES = 52
"""Bytes per position and id of the teacher's top-k: log-probabilities and 64-bit ids of both models, and indices."""
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class MicroBatchMemory:
    """Memory that a rank needs for one micro-batch, in bytes.

    Attributes:
        activations: Tensors that the backward pass reads, without logits.
        logits: Logits, or the block that ``gkd.fuse_lm_head`` keeps.
        top_k: The teacher's top-k and the values of the loss at its ids.
    """

    activations: float
    logits: float
    top_k: float


class _PerToken(NamedTuple):
    """Numbers per token that a pipeline stage keeps for each micro-batch in flight, and those that exist once."""

    stored: float
    transient: float


def micro_batch_memory(
    config: Config, device: str, dims: StudentDims, n_ids: int, n_micro_batches: int
) -> MicroBatchMemory:
    """Return the memory of the largest micro-batches, all of whose positions may be response tokens.

    With pipeline parallelism the sum is for the fuller one of the first and the last stage.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        n_ids: Number of ids with a log-probability of the teacher, at each position.
        n_micro_batches: Micro-batches per step of a data-parallel rank.
    """
    actor = config.actor_rollout_ref.actor
    item, is_megatron = ITEM_BYTES[actor.dtype], actor.strategy == "megatron"
    tp = actor.megatron.tensor_model_parallel_size if is_megatron else 1
    cp = actor.megatron.context_parallel_size if is_megatron else 1
    tokens = micro_batch_tokens(config) / cp
    kept = _kept_per_token(config, device, dims)
    in_flight = _in_flight(actor.megatron, n_micro_batches) if is_megatron else (1.0, 1.0)
    first, last = (tokens * item * (n * kept.stored + kept.transient) for n in in_flight)
    logits, scores = _logits_bytes(config, device, dims, tokens, tp), tokens * n_ids * _TEACHER_ENTRY_BYTES
    if first >= last + logits + scores:
        return MicroBatchMemory(activations=first, logits=0.0, top_k=0.0)
    return MicroBatchMemory(activations=last, logits=logits, top_k=scores)


def _in_flight(megatron: MegatronConfig, n_micro_batches: int) -> tuple[float, float]:
    """Return the micro-batches whose activations the first and the last pipeline stage store at their peak.

    A stage computes the forward passes of a warm-up and one more before its first backward pass
    (megatron/core/pipeline_parallel/schedules.py, ``get_pp_rank_microbatches``). With interleaving these are passes of
    chunks, which have a part of the layers of the stage.
    """
    pp, n_chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    if n_chunks is None:
        return float(min(pp, n_micro_batches)), 1.0
    last = (n_chunks - 1) * pp + 1
    first = 2 * (pp - 1) + last
    return min(first / n_chunks, n_micro_batches), min(last / n_chunks, n_micro_batches)


def micro_batch_tokens(config: Config) -> int:
    """Return the largest number of tokens of a micro-batch. One sequence is never divided."""
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    if actor.use_dynamic_bsz:
        return max(actor.max_token_len, longest)
    return actor.micro_batch_size * longest


def _kept_per_token(config: Config, device: str, dims: StudentDims) -> _PerToken:
    """Return the numbers per token that a rank of one pipeline stage keeps."""
    actor = config.actor_rollout_ref.actor
    megatron = actor.megatron
    if actor.strategy == "fsdp":
        widths, tp, pp, is_sharded = _TRANSFORMERS, 1, 1, True
        recomputes = actor.fsdp_config.gradient_checkpointing
    else:
        is_local = _uses_local_layers(config, device) or (isinstance(dims, ModelDims) and dims.needs_local_layers)
        widths = _LOCAL[device] if is_local else _TRANSFORMER_ENGINE
        if dims.moe is not None and not megatron.override_transformer_config.get("bias_activation_fusion"):
            widths = (*widths[:3], _FFN_OF_MEGATRON)
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        is_sharded = megatron.sequence_parallel
        recomputes = megatron.override_transformer_config.get("recompute_granularity") == "full"
    layers = [_layer_numbers(dims, layer, widths, tp, is_sharded=is_sharded) for layer in range(dims.layers)]
    hidden = dims.hidden / (tp if is_sharded else 1)
    backward = _BACKWARD_OF_LAYER * hidden
    if recomputes:
        return _PerToken(stored=dims.layers / pp * hidden, transient=max(layers) + backward)
    return _PerToken(stored=sum(layers) / pp, transient=backward)


def _layer_numbers(dims: StudentDims, layer: int, widths: Sequence[int], tp: int, *, is_sharded: bool) -> float:
    hidden, query, key, ffn = widths
    columns = dims.ffn
    if dims.moe is not None and dims.moe.layers[layer]:
        columns = dims.moe.top_k * dims.moe.ffn + (dims.moe.shared_ffn or 0)
    inner = (query * dims.heads + key * dims.n_key_heads) * dims.query_dim + ffn * columns
    return hidden * dims.hidden / (tp if is_sharded else 1) + inner / tp


def _uses_local_layers(config: Config, device: str) -> bool:
    impl = impl_setting(config.actor_rollout_ref.actor)
    if impl == "auto":
        return device == "cpu" or importlib.util.find_spec("transformer_engine") is None
    return impl == "local"


def _logits_bytes(config: Config, device: str, dims: StudentDims, rows: float, tp: int) -> float:
    model, dtype, gkd = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.dtype, config.gkd
    columns = dims.vocab_size / tp
    in_float32 = wants_float32_head(model.head_dtype, dtype, device)
    item = max(_FLOAT32 if in_float32 else 0, ITEM_BYTES[dtype])
    if not gkd.fuse_lm_head:
        n_copies = 2 if config.actor_rollout_ref.actor.strategy == "fsdp" else 1
        return n_copies * rows * columns * item
    block = min(rows, gkd.chunk_tokens or max(1.0, BLOCK_BYTES[device] // (columns * item)))
    return block * columns * item + columns * dims.hidden * _FLOAT32
