"""What a worker sets up at its start so that :mod:`recipe_gkd.diagnostics` can look into it when it does not answer."""

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
_STACKS = "recipe_gkd_stacks"
NCCL_FILES = "nccl_"
"""Prefix of the files of NCCL's flight recorder in a worker's scratch folder."""


def enable_stack_dumps() -> None:
    """Call once in a worker, before it opens a process group: :func:`allow_stack_dumps`, and for NCCL's recorder, too.

    With :func:`nccl_environment`, the flight recorder of this process and its children dumps into the scratch folder of
    this one, when its pipe is written to: ``nccl_<rank>`` is the dump of a rank, ``nccl_<rank>.pipe`` its pipe.
    """
    allow_stack_dumps()
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ:
        prefix = str(scratch_folder() / NCCL_FILES)  # torch appends the rank
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = prefix


def allow_stack_dumps() -> None:
    """Call in a worker and in every process that it spawns, as these inherit nothing of it; more than once, if need be.

    SIGUSR1 then writes the stacks of all threads to a file of this process, which serves where py-spy is not
    allowed to look into it. The file is in memory and has no name in a file system: nothing of it can be left behind,
    and nobody else can put a link in its place. :func:`stack_dump_file` finds it.
    """
    _allow_stack_dumps(os.getpid())


@cache
def _allow_stack_dumps(pid: int) -> None:
    faulthandler.register(signal.SIGUSR1, file=os.memfd_create(_STACKS), all_threads=True)
    # Where Yama guards ptrace (most distributions), py-spy, no parent of this process, would be refused.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)


def nccl_environment() -> dict[str, str]:
    """For workers on CUDA: let NCCL's flight recorder run, and dump when its watchdog sees a timeout.

    The names are those of torch 2.13's ``ProcessGroupNCCL.hpp`` and ``FlightRecorder.hpp``; the recorder itself was
    never seen to dump on the machines where this is tested, which have no GPU.
    """
    return {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def stack_dump_file(pid: int) -> Path | None:
    """Return a path by which the stacks file of a live process can be opened; None if it has none."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(descriptor).startswith(f"/memfd:{_STACKS}"):
                    return descriptor
    return None
