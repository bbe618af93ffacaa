"""Memory of a slot on this machine, before any worker has started. Creates no CUDA context."""

from __future__ import annotations

import subprocess

import psutil

from recipe_gkd.runtime.cgroup_memory import limited_groups
from teacher.common.sizes import MIB

_QUERY_TIMEOUT_S = 60.0
"""Deadline of the query. Without the persistence daemon it takes seconds per GPU."""


def slot_memory(device: str, n_slots: int) -> int | None:
    """Return the most memory that each slot of this machine can have, in bytes; None if it is unknown.

    Args:
        device: ``"cuda"`` for the memory of a GPU. If there are more GPUs than slots, the largest are used, and the
            smallest of these counts. ``"cpu"`` for an equal part of the memory that the processes may use.
    """
    if device == "cpu":
        return min([psutil.virtual_memory().total, *(group.limit for group in limited_groups())]) // n_slots
    return nth_largest_gpu(query_gpus("memory.total"), n_slots)


def nth_largest_gpu(lines: str, n_slots: int) -> int | None:
    """Return the memory of the GPU number ``n_slots`` in descending order, in bytes; None if it is unknown.

    Args:
        lines: Memory of each GPU in MiB, one per line. ``nvidia-smi`` writes ``[N/A]`` for GPUs without memory of
            their own.
        n_slots: Number of GPUs that are used.
    """
    sizes = lines.split("\n") if lines else []
    if len(sizes) < n_slots or not all(size.strip().isdigit() for size in sizes):
        return None
    return sorted((int(size) for size in sizes), reverse=True)[n_slots - 1] * MIB


def query_gpus(field: str) -> str:
    """Return a property of each GPU of this machine, one per line; empty if it cannot be read.

    Args:
        field: Property of ``nvidia-smi --query-gpu``, such as ``memory.total`` (in MiB) or ``name``.
    """
    query = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
