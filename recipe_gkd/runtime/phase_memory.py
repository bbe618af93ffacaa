"""Peak memory of one phase of a worker: of the process on a CPU, of the whole device on CUDA."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from teacher.common.proc_files import STATUS, read_bytes
from teacher.common.sizes import KIB

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"  # see proc(5)


def reset_peak(device: str) -> None:
    """Start a phase: :func:`peak_bytes` on a CPU reports the peak since this call.

    Where the kernel does not allow a reset, the peak of the process since its start remains.

    Args:
        device: ``"cpu"`` or ``"cuda"``, also with an index.
    """
    if device.startswith("cuda"):
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(torch.device(device))
        return
    with suppress(OSError):  # a kernel without CONFIG_PROC_PAGE_MONITOR, or a read-only /proc
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS)


def peak_bytes(device: str) -> int:
    """Return the memory of a phase in bytes.

    On a CPU this is the peak resident memory of this process since :func:`reset_peak`. On CUDA it is the memory of the
    whole device that is in use now, also by other processes, and what torch has returned to the device since its own
    peak in this process.

    Args:
        device: ``"cpu"`` or ``"cuda"``, also with an index.
    """
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(torch.device(device))
        returned = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        return total - free + returned
    peak = read_bytes(STATUS, "VmHWM")
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB  # without /proc: the peak since the start
