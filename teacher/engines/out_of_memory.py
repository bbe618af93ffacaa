"""Error of a worker that ran out of memory: phase, memory in use, options of the service to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from teacher.common.out_of_memory import find_out_of_memory, memory_details, reason_of
from teacher.errors import TeacherOutOfMemory

Phase = Literal["start", "engine step", "sleep", "wake-up"]

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


@contextmanager
def out_of_memory_explained(phase: Phase, sizes: Mapping[str, int]) -> Iterator[None]:
    """Convert an out-of-memory error in the context into one that names the phase and the options to change.

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
    return TeacherOutOfMemory(
        "; ".join((f"out of memory ({reason_of(cause)})", *memory_details(sizes))),
        phase=phase,
        sizes=dict(sizes),
        remedy=f"to need less: {ADVICE[phase]}",
    )
