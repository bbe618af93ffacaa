"""Error of a worker that ran out of memory: phase, memory in use, keys to change. Nothing here imports Ray."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from recipe_gkd.errors import GkdError, WorkerError
from teacher.common.causes import causes_of
from teacher.common.out_of_memory import is_out_of_memory, memory_details, reason_of

W = TypeVar("W", bound=WorkerError)

MemoryPhase = Literal[
    "start", "load", "generate", "update", "log-probabilities", "validation", "weight sync", "wake-up", "save"
]
"""Work of a worker during which it can run out of memory."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Advice:
    """Changes of the configuration that lower the memory of a worker.

    Attributes:
        text: Clause for the user.
        keys: Full names of the keys that it names.
    """

    text: str
    keys: tuple[str, ...]


def _any_of(*parts: Advice) -> Advice:
    """Return several changes as alternatives."""
    *texts, last = (part.text for part in parts)
    return Advice(f"{', '.join(texts)}, or {last}", tuple(key for part in parts for key in part.keys))


_STATES = Advice(
    f"divide or offload the states of the actor ({_ACTOR}.megatron.{{tensor_model_parallel_size,param_offload,"
    f"grad_offload,optimizer_offload}}, or {_ACTOR}.fsdp_config.{{fsdp_size,param_offload,optimizer_offload}} with "
    "strategy=fsdp)",
    (
        *(f"{_ACTOR}.megatron.{key}" for key in ("tensor_model_parallel_size", "param_offload")),
        *(f"{_ACTOR}.megatron.{key}" for key in ("grad_offload", "optimizer_offload")),
        *(f"{_ACTOR}.fsdp_config.{key}" for key in ("fsdp_size", "param_offload", "optimizer_offload")),
    ),
)
_MORE_DEVICES = Advice("give the actor more devices", ("trainer.n_gpus_per_node",))
_MICRO_BATCH = Advice(
    f"lower {_ACTOR}.max_token_len (micro_batch_size without use_dynamic_bsz)",
    (f"{_ACTOR}.max_token_len", f"{_ACTOR}.micro_batch_size"),
)
_ACTIVATIONS = Advice(
    f"{_MICRO_BATCH.text}, set gkd.fuse_lm_head=true, recompute activations ({_ACTOR}.megatron."
    "override_transformer_config.{recompute_granularity=full,recompute_method=uniform,recompute_num_layers=1}, or "
    f"{_ACTOR}.fsdp_config.gradient_checkpointing=true with strategy=fsdp)",
    (
        *_MICRO_BATCH.keys,
        "gkd.fuse_lm_head",
        f"{_ACTOR}.megatron.override_transformer_config",
        f"{_ACTOR}.fsdp_config.gradient_checkpointing",
    ),
)
_BUCKET_KEY = f"{_ROLLOUT}.update_weights_bucket_megabytes"
_BUCKET = Advice(f"lower {_BUCKET_KEY}", (_BUCKET_KEY,))
_CACHE = Advice(
    f"lower {_ROLLOUT}.kv_cache_memory_megabytes or gpu_memory_utilization",
    (f"{_ROLLOUT}.kv_cache_memory_megabytes", f"{_ROLLOUT}.gpu_memory_utilization"),
)
_STEP = Advice(
    f"lower {_ROLLOUT}.max_num_seqs or max_num_batched_tokens",
    (f"{_ROLLOUT}.max_num_seqs", f"{_ROLLOUT}.max_num_batched_tokens"),
)
_TENSOR_PARALLEL = Advice(f"raise {_ROLLOUT}.tensor_model_parallel_size", (f"{_ROLLOUT}.tensor_model_parallel_size",))
ADVICE: Mapping[tuple[str, MemoryPhase], Advice] = {
    ("actor", "start"): _any_of(_STATES, _MORE_DEVICES),
    ("actor", "load"): _any_of(_STATES, _MORE_DEVICES),
    ("actor", "log-probabilities"): _STATES,
    ("actor", "validation"): _any_of(_MICRO_BATCH, _STATES),
    ("actor", "update"): _any_of(_ACTIVATIONS, _STATES),
    ("actor", "weight sync"): _any_of(_BUCKET, _STATES),
    ("actor", "save"): Advice(f"{_STATES.text}; a save also copies its tensors to host memory", _STATES.keys),
    ("rollout", "start"): _any_of(_CACHE, _STEP, _TENSOR_PARALLEL),
    ("rollout", "generate"): _any_of(_STEP, _CACHE, _TENSOR_PARALLEL),
    ("rollout", "wake-up"): _any_of(_STATES, _CACHE, _TENSOR_PARALLEL),
    ("rollout", "weight sync"): _any_of(_BUCKET, _CACHE),
}
"""(Pool, phase) -> changes of the configuration."""


def out_of_memory_error(
    error: BaseException,
    kind: type[W],
    *,
    pool: str,
    phase: MemoryPhase,
    worker: str = "",
    sizes: Mapping[str, int] | None = None,
) -> W:
    """Return an error with the reason, the memory in use and the keys to change. Call it before memory is freed.

    Args:
        error: Error of :func:`is_out_of_memory`.
        kind: Class of the result.
        pool: ``"actor"`` or ``"rollout"``.
        phase: Work of the worker.
        worker: Label of the worker. Empty if the caller adds it.
        sizes: Sizes in bytes of the worker's largest tensors, by name, as far as they are known.

    Returns:
        Error with one line of ``details`` for the memory in use, and one for ``sizes``.
    """
    found = ADVICE[pool, phase]
    return kind(
        f"out of memory ({reason_of(error)})",
        phase=phase,
        worker=worker,
        keys=found.keys,
        remedy=advice(pool, phase),
        details=memory_details(sizes),
    )


def advice(pool: str, phase: MemoryPhase) -> str:
    """Return the clause that names the keys to change."""
    return f"to need less memory: {ADVICE[pool, phase].text}"


@contextmanager
def out_of_memory_explained(
    *, pool: str, phase: MemoryPhase, label: str, sizes: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Convert an out-of-memory error in the context into the error of :func:`out_of_memory_error`.

    The tensors of the frames that raised it are freed.

    Args:
        pool: ``"actor"`` or ``"rollout"``.
        phase: Work of the worker.
        label: Name of the worker and its rank.
        sizes: Returns the sizes in bytes of the worker's largest tensors, by name. Called after the failure.

    Raises:
        WorkerError: The device or the host has no memory left.
    """
    try:
        yield
    except Exception as error:
        # Errors that the project raised on purpose already have a message.
        if isinstance(error, GkdError) or not is_out_of_memory(error):
            raise
        failure = out_of_memory_error(error, WorkerError, pool=pool, phase=phase, worker=label, sizes=sizes())
        free_frames(error)
        raise failure from None


def free_frames(error: BaseException | None) -> None:
    """Clear the variables of the finished frames that raised an error and its causes, which may refer to tensors."""
    for each in causes_of(error):
        traceback.clear_frames(each.__traceback__)
