"""Detection of a lack of memory, and the message about it: phase, memory in use, keys to change.

Nothing here imports Ray, and torch is only used if the process has imported it already.
"""

from __future__ import annotations

import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from recipe_gkd.errors import GkdError, WorkerError

Phase = Literal[
    "start", "load", "generate", "update", "log-probabilities", "validation", "weight sync", "wake-up", "save"
]

MAX_BLOCKS_IN_MESSAGE = 5
MAX_ERROR_CHARS = 400
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_STATES = (
    f"divide or offload the states of the actor ({_ACTOR}.megatron.{{tensor_model_parallel_size,param_offload,"
    f"grad_offload,optimizer_offload}}, or {_ACTOR}.fsdp_config.{{fsdp_size,param_offload,optimizer_offload}} with "
    "strategy=fsdp)"
)
_BUCKET = f"lower {_ROLLOUT}.update_weights_bucket_megabytes"
_CACHE = f"lower {_ROLLOUT}.kv_cache_memory_megabytes or gpu_memory_utilization"
_STEP = f"{_ROLLOUT}.max_num_seqs or max_num_batched_tokens"
ADVICE: Mapping[tuple[str, Phase], str] = {
    ("actor", "start"): f"{_STATES}, or give the actor more devices",
    ("actor", "load"): f"{_STATES}, or give the actor more devices",
    ("actor", "log-probabilities"): _STATES,
    ("actor", "validation"): f"lower {_ACTOR}.max_token_len (micro_batch_size without use_dynamic_bsz), or {_STATES}",
    ("actor", "update"): (
        f"lower {_ACTOR}.max_token_len (micro_batch_size without use_dynamic_bsz), set gkd.fuse_lm_head=true, "
        f"recompute activations ({_ACTOR}.megatron.override_transformer_config.{{recompute_granularity=full,"
        f"recompute_method=uniform,recompute_num_layers=1}}, or {_ACTOR}.fsdp_config.gradient_checkpointing=true with "
        f"strategy=fsdp), or {_STATES}"
    ),
    ("actor", "weight sync"): f"{_BUCKET}, or {_STATES}",
    ("actor", "save"): f"{_STATES}; a save also copies its tensors to host memory",
    ("rollout", "start"): f"{_CACHE}, lower {_STEP}, or raise {_ROLLOUT}.tensor_model_parallel_size",
    ("rollout", "generate"): f"lower {_STEP}, {_CACHE}, or raise {_ROLLOUT}.tensor_model_parallel_size",
    ("rollout", "wake-up"): f"{_STATES}, {_CACHE}, or raise {_ROLLOUT}.tensor_model_parallel_size",
    ("rollout", "weight sync"): f"{_BUCKET}, or {_CACHE}",
}
"""(Pool, phase) -> keys to change."""

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


def describe(error: BaseException, sizes: Mapping[str, int] | None = None) -> str:
    """Return the reason and the memory in use, for a message. Call it before memory is freed.

    Args:
        error: Error of :func:`is_out_of_memory`.
        sizes: Sizes in bytes of the worker's largest tensors, by name, as far as they are known.
    """
    cause = find_out_of_memory(error) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[0][:MAX_ERROR_CHARS].rstrip(".") if lines else "no message"
    found = f"out of memory ({type(cause).__name__}: {text})\nmemory: {'; '.join(memory_in_use())}"
    if sizes:
        known = sorted(sizes.items(), key=lambda item: -item[1])
        found += f"\nsizes: {', '.join(f'{name} {gib(size)}' for name, size in known)}"
    return found


def advice(pool: str, phase: Phase) -> str:
    """Return the line of a message that names the keys to change."""
    return f"to need less memory: {ADVICE[pool, phase]}"


@contextmanager
def out_of_memory_explained(
    *, pool: str, phase: Phase, label: str, sizes: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Convert a lack of memory in the context into an error with :func:`describe` and :func:`advice`.

    The tensors of the frames that raised it are freed.

    Args:
        pool: ``"actor"`` or ``"rollout"``.
        phase: What the worker does.
        label: Name of the worker and its rank, for the message.
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
        message = f"{phase}: {label}: {describe(error, sizes())}\n{advice(pool, phase)}"
        free_frames(error)
        raise WorkerError(message) from None


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
    torch: Any = sys.modules.get("torch")
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
