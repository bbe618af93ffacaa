"""Memory of a slot in each phase of a step with ``hybrid_engine``, and the refusal of phases that do not fit.

======== =============================================== ============================================================
Phase    Actor                                           Rollout engine
======== =============================================== ============================================================
sync     weights; gradients and optimizer state if they  weights and a bucket; KV cache at sleep level 0
         are not offloaded
generate each state that is not offloaded                weights and KV cache
update   weights, gradients, optimizer state             nothing at levels 1 and 2 (on a CPU: weights); weights and KV
                                                         cache at level 0
======== =============================================== ============================================================

The peak of an update is the optimizer step, which needs all states. FSDP has gradients during an update only.

Only memory that is certain to be needed is counted, so that each refusal is right. Activations, logits, gathered
weights, CUDA contexts, CUDA graphs and communication buffers are not counted, so a phase that fits here can still run
out of memory. The command ``plan`` adds estimates of them; :func:`engine_overhead` estimates an engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recipe_gkd.actor.offload import KEYS
from recipe_gkd.config.keys import ACTOR, ROLLOUT, key_name
from recipe_gkd.config.schema import Config
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.errors import MemoryBudgetError
from recipe_gkd.memory_budget.actor_states import ITEM_BYTES, ActorMemory, States, read_actor_memory, sync_bytes
from recipe_gkd.rollout.engine_options import EngineOptions
from teacher.common.sizes import GIB, MIB

SLOTS = key_name(lambda config: config.trainer.n_gpus_per_node)

BudgetPhase = Literal["sync", "generate", "update"]

ACTOR_PARTS: Mapping[ActorState, str] = {
    "params": "actor weights",
    "grads": "gradients",
    "optimizer": "optimizer state",
}
_NEEDED_STATES: Mapping[BudgetPhase, Collection[ActorState]] = {
    "sync": ["params"],
    "generate": [],
    "update": ["params", "grads", "optimizer"],
}
_ENGINE_WEIGHTS, _KV_CACHE, _BUCKETS = "engine weights", "KV cache", "buckets"
_PARTS = (*ACTOR_PARTS.values(), _ENGINE_WEIGHTS, _KV_CACHE, _BUCKETS)

_AUTO_BYTES = 2
"""Size of a weight of an engine with ``dtype=auto``: 16 bits, even if the model's own type is float32."""

ENGINE_CONTEXT_BYTES = 1 * GIB
"""CUDA context, loaded kernels, and buffers of libraries of an engine, on each GPU. Estimate, not measured.

The engine has them at all sleep levels. vLLM measures the memory of a GPU after its context exists
(``v1/worker/gpu_worker.py``, ``init_snapshot``), so they are outside of ``gpu_memory_utilization``.
"""
CUDA_GRAPH_BYTES = 1 * GIB
"""CUDA graphs of an engine, on each GPU. Estimate, not measured.

The engine has them at all sleep levels, because ``sleep_mode_offload_cudagraph`` of vLLM is off. vLLM reserves memory
for them within ``gpu_memory_utilization`` when it computes the size of the KV cache.
"""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Memory that a slot needs in a phase.

    Attributes:
        parts: Bytes by name; the names are the table's columns.
    """

    phase: BudgetPhase
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Remedy:
    """Change of the configuration that lowers the memory of a phase.

    Attributes:
        text: Clause for the user.
        keys: Full names of the keys to change.
    """

    text: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shortage:
    """Phase that does not fit into a slot.

    Attributes:
        problem: Needed and available memory, as a clause that starts with a verb.
        remedies: Changes of the configuration, those without more slots first.
    """

    phase: BudgetPhase
    problem: str
    remedies: Sequence[Remedy]

    @property
    def keys(self) -> tuple[str, ...]:
        """Full names of the keys to change."""
        return tuple(key for remedy in self.remedies for key in remedy.keys)

    def __str__(self) -> str:
        return f"{self.phase} {self.problem}: {'; '.join(remedy.text for remedy in self.remedies)}"


def check_memory_budget(config: Config, device: str, slot_memory: Mapping[str, int]) -> str:
    """Compare the memory that each phase needs with the memory of a slot.

    Args:
        config: Configuration of a run with ``hybrid_engine``.
        device: ``"cuda"`` or ``"cpu"``.
        slot_memory: Name of a node -> memory of each of its slots, in bytes. Nodes whose memory is unknown are left
            out. Without any node nothing is refused.

    Returns:
        Text table with one row per phase.

    Raises:
        MemoryBudgetError: A phase does not fit. ``details`` has the table.
        ModelError: The student's ``config.json`` cannot be read or is not supported.
        ConfigError: ``lora.target_modules`` names no layer of the student.
    """
    actor = read_actor_memory(config)
    node = min(slot_memory, key=lambda name: slot_memory[name], default="")
    memory = slot_memory.get(node)
    phases = phase_memory(config, device, actor, memory)
    table = budget_table(config, phases, memory)
    shortages = [] if memory is None else list(_shortages(config, device, phases, memory))
    if shortages:
        slot = "GPU" if device == "cuda" else "CPU slot"
        keys_by_phase: dict[str, tuple[str, ...]] = {each.phase: each.keys for each in shortages}
        raise MemoryBudgetError(
            f"actor_rollout_ref.hybrid_engine=true: actor and rollout engine do not fit into one {slot} of {node}",
            node=node,
            details=(table, *(f"  {each}" for each in shortages)),
            keys=tuple(dict.fromkeys(key for keys in keys_by_phase.values() for key in keys)),
            keys_by_phase=keys_by_phase,
        )
    return table


def phase_memory(config: Config, device: str, actor: ActorMemory, slot_memory: int | None) -> list[PhaseMemory]:
    """Return what a slot holds in each phase.

    Args:
        device: ``"cuda"`` or ``"cpu"``. On a CPU the slots of a node share its memory, so the mean of the pipeline
            stages counts. On CUDA the largest stage counts.
        actor: Sizes of the student.
        slot_memory: Memory of a slot in bytes. None if it is unknown; a KV cache that is a fraction of it then counts
            as 0.
    """
    settings, on_cpu = config.actor_rollout_ref, device == "cpu"
    resident = ACTOR_PARTS.keys() - settings.actor.offloaded_states
    if settings.actor.strategy == "fsdp":
        resident -= {"grads"}
    engine = _engine_parts(config, device, actor.n_weights, slot_memory)
    weights = {_ENGINE_WEIGHTS: engine[_ENGINE_WEIGHTS]}
    sleeps = settings.rollout.sleep_level > 0
    asleep = engine if not sleeps else weights if on_cpu else {}
    receiving = (weights if sleeps else engine) | {_BUCKETS: _bucket_bytes(config, actor)}

    parts_of_engine: dict[BudgetPhase, dict[str, float]] = {"sync": receiving, "generate": engine, "update": asleep}
    return [
        PhaseMemory(
            phase=phase,
            parts=_actor_parts(actor.stages, resident.union(_NEEDED_STATES[phase]), on_cpu=on_cpu) | parts,
        )
        for phase, parts in parts_of_engine.items()
    ]


def engine_overhead(config: Config, device: str, phase: PhaseMemory) -> dict[str, float]:
    """Return estimates of what an engine keeps on a GPU beside weights and KV cache, even while it sleeps.

    Args:
        config: Configuration of a run with ``hybrid_engine``.
        device: ``"cuda"`` or ``"cpu"``, where nothing is added.
        phase: A result of :func:`phase_memory`.

    Returns:
        Bytes by name, for one GPU.
    """
    if device != "cuda":
        return {}
    rollout, parts = config.actor_rollout_ref.rollout, {"engine context": float(ENGINE_CONTEXT_BYTES)}
    is_in_fraction = rollout.kv_cache_memory_megabytes is None and _KV_CACHE in phase.parts
    if not rollout.enforce_eager and not is_in_fraction:
        parts["CUDA graphs"] = float(CUDA_GRAPH_BYTES)
    return parts


def budget_table(config: Config, phases: Sequence[PhaseMemory], slot_memory: int | None) -> str:
    """Return the parts of each phase in GiB as an aligned text table.

    Args:
        phases: Result of :func:`phase_memory`.
        slot_memory: Memory of a slot in bytes; None if it is unknown.
    """
    rows = [("GiB", *_PARTS, "sum")]
    for each in phases:
        cells = (f"{each.parts[part] / GIB:.2f}" if part in each.parts else "-" for part in _PARTS)
        rows.append((each.phase, *cells, f"{each.total / GIB:.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    known = "unknown" if slot_memory is None else f"{slot_memory / GIB:.2f} GiB"
    lines.append(
        f"memory of a slot: {known}; activations, temporary buffers, CUDA contexts and graphs are not in the table"
    )
    if config.actor_rollout_ref.teacher.sleep_between_batches:
        lines.append("the memory of the teacher is unknown: it may use the same slot, also while it sleeps")
    return "\n".join(f"  {line}" for line in lines)


def _actor_parts(stages: Sequence[States], states: Collection[ActorState], *, on_cpu: bool) -> dict[str, float]:
    """Return the states of the largest pipeline stage, on a CPU of the mean of all stages."""
    largest = max(stages, key=lambda stage: sum(stage[state] for state in states))
    counted = stages if on_cpu else [largest]
    return {
        part: sum(stage[state] for stage in counted) / len(counted)
        for state, part in ACTOR_PARTS.items()
        if state in states
    }


def _engine_parts(config: Config, device: str, n_weights: int, slot_memory: int | None) -> dict[str, float]:
    """Return the weights and the KV cache of an engine. Without a size, vLLM fills its fraction of the memory."""
    rollout, size = config.actor_rollout_ref.rollout, EngineOptions.from_config(config, device).kv_cache_bytes
    weights = n_weights * ITEM_BYTES.get(rollout.dtype, _AUTO_BYTES) / rollout.tensor_model_parallel_size
    cache = max(0.0, rollout.gpu_memory_utilization * (slot_memory or 0) - weights) if size is None else size
    return {_ENGINE_WEIGHTS: weights, _KV_CACHE: cache}


def _bucket_bytes(config: Config, actor: ActorMemory) -> float:
    """Return the least size of the largest bucket that an engine receives.

    A tensor that does not fit into a bucket starts the next one. Of two consecutive buckets, one is therefore more than
    half full.
    """
    half = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * MIB / 2
    return min(half, sync_bytes(config, actor))


def _shortages(config: Config, device: str, phases: Sequence[PhaseMemory], memory: int) -> Iterator[Shortage]:
    """Yield the phases that do not fit."""
    rollout = config.actor_rollout_ref.rollout
    for each in phases:
        if each.total > memory:
            excess = (each.total - memory) / GIB
            needed = f"needs {each.total / GIB:.2f} GiB, {excess:.2f} GiB more than a slot has"
            yield Shortage(each.phase, needed, list(_remedies(config, device, each, memory)))
        elif each.phase == "generate" and each.parts[_KV_CACHE] <= 0:
            key = f"{ROLLOUT}.gpu_memory_utilization"
            yield Shortage(
                "generate",
                f"has no memory for the KV cache: {key}={rollout.gpu_memory_utilization:g} is "
                f"{rollout.gpu_memory_utilization * memory / GIB:.2f} GiB, and the weights of the engine need "
                f"{each.parts[_ENGINE_WEIGHTS] / GIB:.2f} GiB",
                [_change("raise", key), _change("raise", f"{ROLLOUT}.tensor_model_parallel_size")],
            )


def _change(verb: str, key: str, value: str = "") -> Remedy:
    return Remedy(f"{verb} {key}{value}", (key,))


def _remedies(config: Config, device: str, phase: PhaseMemory, memory: int) -> Iterator[Remedy]:
    """Yield the changes of the configuration that lower the memory of a phase, those without more slots first."""
    rollout = config.actor_rollout_ref.rollout
    section = "megatron" if config.actor_rollout_ref.actor.strategy == "megatron" else "fsdp_config"
    keys = tuple(
        f"{ACTOR}.{section}.{key}"
        for state, key in KEYS.items()
        if state not in _NEEDED_STATES[phase.phase] and ACTOR_PARTS[state] in phase.parts
    )
    if keys:
        yield Remedy(f"set {' '.join(f'{key}=true' for key in keys)}", keys)
    if rollout.sleep_level == 0 and phase.phase != "generate":
        yield _change("set", f"{ROLLOUT}.sleep_level", "=2")
    if phase.phase == "generate":
        by_size = device == "cpu" or rollout.kv_cache_memory_megabytes is not None
        yield _change("lower", f"{ROLLOUT}.{'kv_cache_memory_megabytes' if by_size else 'gpu_memory_utilization'}")
    if phase.total - memory < phase.parts.get(_BUCKETS, 0):
        yield _change("lower", f"{ROLLOUT}.update_weights_bucket_megabytes")
    has_more_slots = rollout.tensor_model_parallel_size < config.trainer.n_gpus_per_node
    if _ENGINE_WEIGHTS in phase.parts and device == "cuda" and has_more_slots:
        yield _change("raise", f"{ROLLOUT}.tensor_model_parallel_size")
    if device == "cuda":
        yield from _layout_remedies(config)
    elif config.trainer.n_gpus_per_node > 1:
        yield Remedy(f"lower {SLOTS}, because the slots share the memory of the node", (SLOTS,))
    else:
        yield Remedy("use a machine with more memory, or a smaller student")


def _layout_remedies(config: Config) -> Iterator[Remedy]:
    """Yield the changes that lower the memory of an actor rank on a GPU."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    n_ranks = trainer.nnodes * trainer.n_gpus_per_node
    if actor.strategy == "fsdp" and actor.fsdp_config.fsdp_size not in (-1, n_ranks):
        yield _change("set", f"{ACTOR}.fsdp_config.fsdp_size", "=-1")
    if not actor.lora.rank:
        yield Remedy(f"train adapters only ({ACTOR}.lora.rank)", (f"{ACTOR}.lora.rank",))
    if actor.strategy == "fsdp":
        yield _change("raise", SLOTS)
        return
    if not actor.megatron.use_distributed_optimizer and n_ranks > 1:
        yield _change("set", f"{ACTOR}.megatron.use_distributed_optimizer", "=true")
    tensor_parallel = f"{ACTOR}.megatron.tensor_model_parallel_size"
    yield Remedy(f"raise {SLOTS} and {tensor_parallel}", (SLOTS, tensor_parallel))
