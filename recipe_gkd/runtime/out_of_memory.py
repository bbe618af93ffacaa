"""Detection of a lack of memory, and the error about it: phase, memory in use, keys to change.

Nothing here imports Ray, and torch is only used if the process has imported it already.
"""

from __future__ import annotations

import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from recipe_gkd.errors import GkdError, WorkerError

W = TypeVar("W", bound=WorkerError)

MemoryPhase = Literal[
    "start", "load", "generate", "update", "log-probabilities", "validation", "weight sync", "wake-up", "save"
]
"""Work of a worker during which it can run out of memory."""

MAX_BLOCKS_IN_MESSAGE = 5
MAX_ERROR_CHARS = 400
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

_TEXTS = re.compile(
    r"(CUDA|HIP) out of memory|CUDA (driver )?[eE]rror: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|Cuda failure\W+(\d+ )?'out of memory'|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc"
)
"""Texts of torch, CUDA's libraries and NCCL. Libraries raise them as ``RuntimeError`` or as a subclass of it."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if ``error``, or one of its causes, reports that a device or the host has no memory left.

    The text of a :class:`GkdError` is ignored, because it may repeat the error of another process.
    """
    return find_out_of_memory(error) is not None


def find_out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the first error that reports a lack of memory among ``error`` and its causes, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        is_torch = any(f"{base.__module__}.{base.__name__}" in _TORCH_CLASSES for base in type(error).__mro__)
        if isinstance(error, MemoryError) or is_torch:
            return error
        if isinstance(error, RuntimeError) and not isinstance(error, GkdError) and _TEXTS.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


_TORCH_CLASSES = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")


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


def memory_details(sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return the lines of an error about the memory in use, and about the sizes of tensors in descending order.

    Args:
        sizes: Sizes in bytes, by name.
    """
    memory = f"memory: {'; '.join(memory_in_use())}"
    if not sizes:
        return (memory,)
    known = sorted(sizes.items(), key=lambda item: -item[1])
    return memory, f"sizes: {', '.join(f'{name} {gib(size)}' for name, size in known)}"


def reason_of(error: BaseException) -> str:
    """Return the class and the first line of the error that reports the lack of memory."""
    cause = find_out_of_memory(error) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0][:MAX_ERROR_CHARS].rstrip('.') if lines else 'no message'}"


def advice(pool: str, phase: MemoryPhase) -> str:
    """Return the clause that names the keys to change."""
    return f"to need less memory: {ADVICE[pool, phase].text}"


@contextmanager
def out_of_memory_explained(
    *, pool: str, phase: MemoryPhase, label: str, sizes: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Convert a lack of memory in the context into the error of :func:`out_of_memory_error`.

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
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def memory_in_use() -> list[str]:
    """Return descriptions of the memory of this process, and of its current GPU if it uses one."""
    return [*_cuda_memory(), *_host_memory()]


def gib(n_bytes: float) -> str:
    """Return a size as text, in GiB or MiB."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


def _cuda_memory() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    try:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        allocated, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
        blocks = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
    except RuntimeError as error:  # a failed call may leave the device unusable
        return [f"state of the GPU unknown ({str(error).splitlines()[0]})"]
    largest = ", ".join(gib(size) for size in sorted(blocks, reverse=True)[:MAX_BLOCKS_IN_MESSAGE])
    others = max(total - free - reserved, 0)
    return [
        f"GPU {gib(total)} in total, {gib(free)} free",
        f"PyTorch in this process {gib(allocated)} allocated, {gib(reserved)} reserved, largest blocks: "
        f"{largest or 'none'}",
        f"CUDA contexts, libraries and other processes {gib(others)}",
    ]


def _host_memory() -> list[str]:
    found = []
    if (resident := _read_kib("/proc/self/status", "VmRSS")) is not None:
        found.append(f"resident memory of this process {gib(resident)}")
    if (available := _read_kib("/proc/meminfo", "MemAvailable")) is not None:
        found.append(f"available on this node {gib(available)}")
    for name, limit in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            found.append(f"limit of this process for its {name} {gib(soft)}")
    return found


def _read_kib(path: str, name: str) -> int | None:
    """Return the value of a line such as ``VmRSS:  12 kB`` in bytes; None if the file or the line is missing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
