"""Error of a worker without memory: phase, memory in use, options of the service to change.

torch is only used if the process has imported it already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from teacher.errors import TeacherOutOfMemory

Phase = Literal["start", "engine step", "sleep", "wake-up"]

_MAX_BLOCKS = 5
_MAX_ERROR_CHARS = 400
_CACHE = "lower GPU_MEMORY_UTILIZATION or KV_CACHE_MIB"
_STEP = "lower LOGITS_MIB, MAX_MODEL_LEN, N_LOGPROBS or MAX_RESULT_MIB"
ADVICE: Mapping[Phase, str] = {
    "start": f"free memory that other processes use, {_CACHE}, {_STEP}, or raise TP_SIZE",
    "engine step": f"logits and results need memory outside of the KV cache: {_CACHE}, {_STEP}, or raise TP_SIZE",
    "sleep": "the weights are copied to host memory: free host memory, or start the worker without SLEEP_MODE=1",
    "wake-up": f"another process has not released the devices: let it do so before the wake-up, {_CACHE}, or raise "
    "TP_SIZE",
}
"""Phase -> options of the service to change."""

_TEXTS = re.compile(
    r"(CUDA|HIP) out of memory|(CUDA|CUDART) (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|Cuda failure\W+(\d+ )?'out of memory'|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|less than desired GPU memory utilization",
    re.IGNORECASE,
)
"""Texts of torch, CUDA's libraries, NCCL and vLLM. vLLM repeats the text of an error of another rank."""


def find_out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the first error that reports a lack of memory among ``error`` and its causes, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        is_torch = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
        if isinstance(error, MemoryError) or is_torch:
            return error
        if isinstance(error, RuntimeError | ValueError) and _TEXTS.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def out_of_memory_explained(phase: Phase, sizes: Mapping[str, int]) -> Iterator[None]:
    """Convert a lack of memory in the context into an error that names the phase and the options to change.

    Args:
        phase: What the worker does.
        sizes: Sizes in bytes of its largest allocations by name, as far as they are known.

    Raises:
        TeacherOutOfMemory: A device or the host has no memory left.
    """
    try:
        yield
    except Exception as error:
        if (cause := find_out_of_memory(error)) is None:  # an error of the service may have it as its cause
            raise
        raise explain(cause, phase, sizes) from error


def explain(cause: BaseException, phase: Phase, sizes: Mapping[str, int]) -> TeacherOutOfMemory:
    """Return the error of the service.

    Args:
        cause: Error of ``find_out_of_memory``.
        phase: What the worker did.
        sizes: Sizes in bytes by name.
    """
    text = " ".join(str(cause).split())[:_MAX_ERROR_CHARS].rstrip(".")
    known = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
    parts = [
        f"out of memory ({type(cause).__name__}: {text})",
        *_cuda_memory(),
        _host_memory(),
        f"largest allocations: {known}" if known else "",
    ]
    return TeacherOutOfMemory(
        "; ".join(part for part in parts if part),
        phase=phase,
        sizes=dict(sizes),
        remedy=f"to need less: {ADVICE[phase]}",
    )


def _cuda_memory() -> list[str]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    try:
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        blocks = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
    except RuntimeError as error:  # a failed call may leave the device unusable
        return [f"state of the GPU unknown ({str(error).splitlines()[0]})"]
    largest = ", ".join(_gib(size) for size in sorted(blocks, reverse=True)[:_MAX_BLOCKS]) or "none"
    return [
        f"GPU: {_gib(total)} in total, {_gib(free)} free",
        f"this process: {_gib(allocated)} allocated, {_gib(reserved)} reserved, largest blocks {largest}",
    ]


def _host_memory() -> str:
    found = []
    for path, name, text in (
        ("/proc/self/status", "VmRSS", "this process {}"),
        ("/proc/meminfo", "MemAvailable", "{} available"),
    ):
        try:
            match = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:  # not Linux
            continue
        if match:
            found.append(text.format(_gib(1024 * int(match[1]))))
    return f"host: {', '.join(found)}" if found else ""


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
