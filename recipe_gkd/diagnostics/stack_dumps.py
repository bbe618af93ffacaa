"""Preparation of a worker process for :mod:`recipe_gkd.diagnostics.node_agent`, which inspects it when it hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path

from recipe_gkd.runtime.scratch import scratch_folder

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h
_MEMFD_NAME = "recipe_gkd_stacks"
NCCL_PREFIX = "nccl_"
"""Prefix of the files of NCCL's flight recorder in a worker's scratch folder."""


def enable_stack_dumps() -> None:
    """Prepare this worker for stack dumps and for dumps of NCCL's flight recorder.

    Call it once in a worker, before it opens a process group. With :func:`nccl_environment`, the flight recorders of
    this process and its children write ``nccl_<rank>`` in the scratch folder of this process when a byte is written to
    the pipe ``nccl_<rank>.pipe`` there.
    """
    allow_stack_dumps()
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        prefix = str(scratch_folder() / NCCL_PREFIX)  # torch appends the rank
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = prefix


def allow_stack_dumps() -> None:
    """Allow other processes of this user to read the Python stacks of this process.

    Call it in a worker and in every process that the worker spawns, because these do not inherit it. Repeated calls
    have no effect.

    SIGUSR1 then writes the stacks of all threads to a file of this process, for systems where py-spy is not permitted.
    The file is in memory and has no name in a file system, so it cannot remain after the process, and other users
    cannot replace it by a link. :func:`stack_dump_file` returns its path.
    """
    _allow_stack_dumps(os.getpid())


@cache
def _allow_stack_dumps(pid: int) -> None:
    faulthandler.register(signal.SIGUSR1, file=os.memfd_create(_MEMFD_NAME), all_threads=True)
    # Where Yama guards ptrace (most distributions), py-spy needs this permission, because it is not a parent process.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)


def nccl_environment() -> dict[str, str]:
    """Return environment variables for workers on CUDA that enable NCCL's flight recorder and its dump on a timeout.

    Without ``TORCH_NCCL_ENABLE_MONITORING=0``, torch ends a process minutes after the failure of any of its groups. A
    failed weight sync, which concerns one group, would then end the actor. All hangs end at a deadline of the driver.

    The names come from torch 2.13's ``ProcessGroupNCCL.hpp`` and ``FlightRecorder.hpp``. The tests run without a
    GPU, so a dump by NCCL itself is not tested.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def stack_dump_file(pid: int) -> Path | None:
    """Return a path that opens the stacks file of a live process, or None if it has none."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # The descriptor may have been closed meanwhile.
                if os.readlink(descriptor).startswith(f"/memfd:{_MEMFD_NAME}"):
                    return descriptor
    return None
