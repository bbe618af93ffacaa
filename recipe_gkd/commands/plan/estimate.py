"""Figures of a run, computed from its configuration and the ``config.json`` of the student."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.commands.plan.activations import MicroBatchMemory, micro_batch_memory, micro_batch_tokens
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.config.responses import ResponseCounts
from recipe_gkd.config.schema import Config
from recipe_gkd.config.support import Support
from recipe_gkd.memory_budget.actor_states import (
    ITEM_BYTES,
    ActorMemory,
    States,
    has_gradient_copies,
    read_actor_memory,
    sync_bytes,
)
from recipe_gkd.memory_budget.phases import ACTOR_PARTS, PhaseMemory, engine_overhead, phase_memory
from recipe_gkd.rollout.limits import engine_length
from teacher.common.sizes import GIB

PROCESS_BYTES = {"cpu": 0.7 * GIB, "cuda": 2 * GIB}
"""Memory of an actor without a model: the libraries on a CPU, the context and communication buffers on CUDA."""
_DEFAULT_TOP_K = 256
"""``N_LOGPROBS`` of a teacher service that does not set it."""
_MOMENT_SHARE = {4: 1 / 2, 2: 1 / 3}
"""Bytes of a stored parameter -> share of a moment in the optimizer state. Megatron's AdamW allocates another one."""
_KV_CACHE = "KV cache"


@dataclass(frozen=True, kw_only=True)
class PoolMemory:
    """Memory of a device at its peak.

    Attributes:
        name: ``actor`` or ``rollout``; with ``hybrid_engine`` the phases ``sync``, ``generate`` and ``update``.
        parts: Bytes by name.
    """

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Figures of a run.

    Attributes:
        n_rank_parameters: Parameters of the actor rank with the most.
        device_memory: Memory of a device in bytes; None if it is unknown.
        problems: What does not fit.
        excess: Bytes by which the memory is exceeded, summed over the pools.
        cached_tokens: Tokens that the KV cache of an engine holds.
        tokens: Tokens of a step at most, prompts included.
        micro_batches: Micro-batches per step of a data-parallel rank, if all sequences have their maximum length.
        micro_batch_tokens: Tokens of a micro-batch at most.
        sync_bytes: Bytes that a weight sync sends to each rollout worker.
        teacher_bytes: Bytes that the teachers send per step at most.
        token_bytes: Bytes that a teacher sends for a response token.
        n_ids: Number of ids with a log-probability of the teacher, at each position.
    """

    n_parameters: int
    n_rank_parameters: float
    pools: list[PoolMemory]
    device_memory: int | None
    problems: list[str]
    excess: float
    cached_tokens: int
    tokens: int
    micro_batches: int
    micro_batch_tokens: int
    sync_bytes: float
    teacher_bytes: float
    token_bytes: int
    n_ids: int


def estimate_run(config: Config, device: str, device_memory: int | None) -> RunEstimate:
    """Return the figures of a run.

    Args:
        config: Configuration of the run, whose model path is a folder.
        device: ``"cuda"`` or ``"cpu"``.
        device_memory: Memory of a GPU or a CPU slot in bytes; None if it is unknown, and nothing is a problem.

    Raises:
        ModelError: The student's ``config.json`` cannot be read or is not supported.
        ConfigError: ``lora.target_modules`` names no layer of the student.
    """
    config = with_data_types(config, device)
    settings, data = config.actor_rollout_ref, config.data
    actor, dims = read_actor_memory(config), read_student_dims(settings.model.path, config)
    top_k = min(settings.teacher.top_k or _DEFAULT_TOP_K, dims.vocab_size)
    n_ids = Support.of(config).max_ids(top_k)
    most = ResponseCounts.most(config)
    longest = data.max_prompt_length + data.max_response_length
    per_batch = max(1, micro_batch_tokens(config) // longest)
    n_micro_batches = math.ceil(math.ceil(most.trained / data_parallel_size(config)) / per_batch)
    batch = micro_batch_memory(config, device, dims, n_ids, n_micro_batches)
    by_phase = phase_memory(config, device, actor, device_memory)
    phases: dict[str, PhaseMemory] = {phase.phase: phase for phase in by_phase}
    pools = _pools(config, device, actor, batch, phases)
    cache = phases["generate"].parts[_KV_CACHE]
    per_token = _cache_bytes_per_token(config, dims)
    cached_tokens = int(cache / per_token) if per_token else 0
    excesses = [] if device_memory is None else list(_excesses(config, pools, device_memory, cache, dims))
    token_bytes = n_ids * (6 if settings.teacher.wire_dtype == "float16" else 8) + 4
    return RunEstimate(
        n_parameters=actor.n_weights,
        n_rank_parameters=max(stage["params"] for stage in actor.stages) / _stored_item(config),
        pools=pools,
        device_memory=device_memory,
        problems=[text for text, _ in excesses],
        excess=sum(size for _, size in excesses),
        cached_tokens=cached_tokens,
        tokens=most.trained * longest,
        micro_batches=n_micro_batches,
        micro_batch_tokens=micro_batch_tokens(config),
        sync_bytes=sync_bytes(config, actor),
        teacher_bytes=most.scored * data.max_response_length * token_bytes,
        token_bytes=token_bytes,
        n_ids=n_ids,
    )


def data_parallel_size(config: Config) -> int:
    """Return the number of data-parallel ranks of the actor."""
    actor, n_ranks = config.actor_rollout_ref.actor, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if actor.strategy == "fsdp":
        return n_ranks
    megatron = actor.megatron
    shared = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return max(1, n_ranks // (shared * megatron.context_parallel_size))


def _stored_item(config: Config) -> int:
    """Return the bytes of a stored parameter of the actor."""
    actor = config.actor_rollout_ref.actor
    is_float32 = actor.strategy == "fsdp" and not actor.lora.rank
    return 4 if is_float32 else ITEM_BYTES[actor.dtype]


def _pools(
    config: Config, device: str, actor: ActorMemory, batch: MicroBatchMemory, phases: Mapping[str, PhaseMemory]
) -> list[PoolMemory]:
    update = _update_parts(config, device, actor, batch)
    if not config.actor_rollout_ref.hybrid_engine:
        engine = {name: size for name, size in phases["generate"].parts.items() if name not in ACTOR_PARTS.values()}
        return [PoolMemory(name="actor", parts=update), PoolMemory(name="rollout", parts=engine)]
    of_engine = {name: size for name, size in phases["update"].parts.items() if name not in ACTOR_PARTS.values()}
    process = {"process": PROCESS_BYTES[device]}
    by_phase = {phase: {**phases[phase].parts, **process} for phase in ("sync", "generate")}
    by_phase["update"] = {**update, **of_engine}
    return [
        PoolMemory(name=phase, parts={**parts, **engine_overhead(config, device, phases[phase])})
        for phase, parts in by_phase.items()
    ]


def _update_parts(config: Config, device: str, actor: ActorMemory, batch: MicroBatchMemory) -> dict[str, float]:
    """Return the memory at the update's peak: backward pass or optimizer step, whichever is larger."""
    largest: States = max(actor.stages, key=lambda stage: sum(stage.values()))
    states = {part: largest[state] for state, part in ACTOR_PARTS.items()}
    process = {"process": PROCESS_BYTES[device]}
    backward = states | {"activations": batch.activations, "logits": batch.logits, "top-k": batch.top_k} | process
    if "optimizer" in config.actor_rollout_ref.actor.offloaded_states:
        del backward[ACTOR_PARTS["optimizer"]]
    is_megatron = config.actor_rollout_ref.actor.strategy == "megatron"  # FSDP's fused AdamW allocates nothing
    moment = largest["optimizer"] * _MOMENT_SHARE[_stored_item(config)] if is_megatron else 0.0
    n_temporary = 2 if has_gradient_copies(config.actor_rollout_ref.actor) else 1  # a copy is as large as a moment
    step = {**states, "optimizer step": n_temporary * moment, **process}
    return max(backward, step, key=lambda parts: sum(parts.values()))


def _cache_bytes_per_token(config: Config, dims: StudentDims) -> float:
    rollout = config.actor_rollout_ref.rollout
    return dims.cached_numbers(rollout.tensor_model_parallel_size) * ITEM_BYTES.get(rollout.dtype, 2)


def _excesses(
    config: Config, pools: list[PoolMemory], memory: int, cache: float, dims: StudentDims
) -> Iterator[tuple[str, float]]:
    """Yield each problem and the bytes that are missing."""
    for pool in pools:
        if pool.total > memory:
            yield (
                f"{pool.name} needs {pool.total / GIB:.2f} GiB, a device has {memory / GIB:.2f} GiB",
                pool.total - memory,
            )
    needed = engine_length(config) * _cache_bytes_per_token(config, dims)
    if cache < needed:
        yield (
            f"the KV cache of {cache / GIB:.2f} GiB does not hold one sequence of {engine_length(config)} tokens, "
            f"which takes {needed / GIB:.2f} GiB",
            needed - cache,
        )
