"""Detection of errors that report no free memory, and descriptions of the memory in use.

torch is only used if the process has imported it already.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping
from typing import Any

from teacher.common.causes import causes_of
from teacher.common.detailed_error import DetailedError
from teacher.common.proc_files import MEMINFO, STATUS, read_bytes
from teacher.common.sizes import size_text

_MAX_BLOCKS = 5
_MAX_REASON_CHARS = 400
_TORCH_CLASSES = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
_TEXTS = re.compile(
    r"(CUDA|HIP) out of memory|(CUDA|CUDART) (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|Cuda failure\W+(\d+ )?'out of memory'|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc",
    re.IGNORECASE,
)
"""Texts of torch, CUDA's libraries, NCCL and vLLM's allocator. They are raised as subclasses of ``RuntimeError``."""
VLLM_START_REFUSAL = "is less than desired GPU memory utilization"
"""Text of the ``ValueError`` of ``vllm/v1/worker/utils.py`` about a device without free memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if ``error``, or one of its causes, reports that a device or the host has no memory left."""
    return find_out_of_memory(error) is not None


def find_out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the first error that reports it among ``error`` and its causes, or None.

    The text of an error of this project is ignored, because it may repeat the error of another process.
    """
    return next(filter(_reports_it, causes_of(error)), None)


def _reports_it(error: BaseException) -> bool:
    if isinstance(error, DetailedError):
        return False
    is_torch = any(f"{base.__module__}.{base.__name__}" in _TORCH_CLASSES for base in type(error).__mro__)
    if isinstance(error, MemoryError) or is_torch:
        return True
    if isinstance(error, ValueError):
        return VLLM_START_REFUSAL in str(error)
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def reason_of(error: BaseException) -> str:
    """Return the class and the first line of the error that reports that memory ran out."""
    cause = find_out_of_memory(error) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0][:_MAX_REASON_CHARS].rstrip('.') if lines else 'no message'}"


def memory_details(sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return the lines of an error about the memory in use, and about the sizes of tensors in descending order.

    Args:
        sizes: Sizes in bytes, by name.
    """
    memory = f"memory: {'; '.join(memory_in_use())}"
    if not sizes:
        return (memory,)
    known = sorted(sizes.items(), key=lambda item: -item[1])
    return memory, f"sizes: {', '.join(f'{name} {size_text(size)}' for name, size in known)}"


def memory_in_use() -> list[str]:
    """Return descriptions of the memory of this process, and of its current GPU if it uses one."""
    return [*_cuda_memory(), *_host_memory()]


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
    largest = ", ".join(size_text(size) for size in sorted(blocks, reverse=True)[:_MAX_BLOCKS])
    others = max(total - free - reserved, 0)
    return [
        f"GPU {size_text(total)} in total, {size_text(free)} free",
        f"PyTorch in this process {size_text(allocated)} allocated, {size_text(reserved)} reserved, largest blocks: "
        f"{largest or 'none'}",
        f"CUDA contexts, libraries and other processes {size_text(others)}",
    ]


def _host_memory() -> list[str]:
    found = []
    if (resident := read_bytes(STATUS, "VmRSS")) is not None:
        found.append(f"resident memory of this process {size_text(resident)}")
    if (available := read_bytes(MEMINFO, "MemAvailable")) is not None:
        found.append(f"available on this node {size_text(available)}")
    for name, limit in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            found.append(f"limit of this process for its {name} {size_text(soft)}")
    return found
