"""What a worker sets up at its start so that :mod:`recipe_gkd.diagnosis` can look into it when it does not answer."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import tempfile
from functools import cache
from pathlib import Path

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h


def watch_stacks() -> None:
    """Call once in a worker, before it opens a process group: :func:`open_to_watchers`, and for NCCL's recorder, too.

    With :func:`nccl_environment`, the flight recorder of this process and its children dumps into files that bear this
    one's name, when asked by its pipe.
    """
    open_to_watchers()
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ:
        prefix = str(nccl_prefix(os.getpid()))  # torch appends the rank
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = prefix


def open_to_watchers() -> None:
    """Call in a worker and in every process that it spawns, as these inherit nothing of it; more than once, if need be.

    SIGUSR1 then writes the stacks of all threads to a file of this process, which serves where py-spy is not
    allowed to look into it.
    """
    _open_to_watchers(os.getpid())


@cache
def _open_to_watchers(pid: int) -> None:
    os.makedirs(_folder(), mode=0o700, exist_ok=True)
    for file in _folder().iterdir():  # of processes that nobody has cleaned up after
        if not Path("/proc", file.name.partition(".")[0]).exists():
            file.unlink(missing_ok=True)
    faulthandler.register(signal.SIGUSR1, file=open(stacks_file(pid), "w"), all_threads=True)  # noqa: SIM115
    # Where Yama guards ptrace (most distributions), py-spy, no parent of this process, would be refused.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)


def nccl_environment() -> dict[str, str]:
    """For workers on CUDA: let NCCL's flight recorder run, and dump when its watchdog sees a timeout.

    The names are those of torch 2.13's ``ProcessGroupNCCL.hpp`` and ``FlightRecorder.hpp``; the recorder itself was
    never seen to dump on the machines where this is tested, which have no GPU.
    """
    return {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def stacks_file(pid: int) -> Path:
    return _folder() / f"{pid}.stacks"


def nccl_prefix(pid: int) -> Path:
    """``<prefix><rank>`` is the dump of a rank, ``<prefix><rank>.pipe`` what asks for it."""
    return _folder() / f"{pid}.nccl_"


def forget(pid: int) -> None:
    """Remove the files of a process that has ended."""
    for file in _folder().glob(f"{pid}.*"):
        file.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"recipe_gkd_{os.getuid()}"
