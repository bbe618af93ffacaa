"""Memory of a slot on this machine, before any worker has started. Creates no CUDA context."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from recipe_gkd.runtime.cgroup_memory import limited_groups
from teacher.common.sizes import MIB

_QUERY_TIMEOUT_S = 60.0
"""Deadline of the query. Without the persistence daemon it takes seconds per GPU."""


def slot_memory(device: str, n_slots: int, *, visible_only: bool = True) -> int | None:
    """Return the most memory that each slot of this machine can have, in bytes; None if it is unknown.

    Args:
        device: ``"cuda"`` for the memory of a GPU. If there are more GPUs than slots, the largest are used, and the
            smallest of these counts. ``"cpu"`` for an equal part of the memory that the processes may use.
        visible_only: See :func:`query_gpus`.
    """
    if device == "cpu":
        return min([psutil.virtual_memory().total, *(group.limit for group in limited_groups())]) // n_slots
    return nth_largest_gpu(query_gpus("memory.total", visible_only=visible_only), n_slots)


def nth_largest_gpu(sizes: Sequence[str], n_slots: int) -> int | None:
    """Return the memory of the GPU number ``n_slots`` in descending order, in bytes; None if it is unknown.

    Args:
        sizes: Memory of each GPU in MiB. ``nvidia-smi`` writes ``[N/A]`` for GPUs that share the memory of the host.
        n_slots: Number of GPUs that are used.
    """
    if len(sizes) < n_slots or not all(size.isdigit() for size in sizes):
        return None
    return sorted((int(size) for size in sizes), reverse=True)[n_slots - 1] * MIB


def query_gpus(field: str, *, visible_only: bool = True) -> list[str]:
    """Return a property of each GPU of this machine; nothing if it cannot be read.

    Args:
        field: Property of ``nvidia-smi --query-gpu``, such as ``memory.total`` (in MiB) or ``name``.
        visible_only: Leave out the GPUs that ``CUDA_VISIBLE_DEVICES`` of this process hides. False in a process in
            which Ray has set the variable.
    """
    query = ("nvidia-smi", f"--query-gpu=index,uuid,{field}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [_Gpu(*(cell.strip() for cell in line.split(",", 2))) for line in done.stdout.strip().splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible_only else None
    return [gpu.value for gpu in (gpus if visible is None else _visible(gpus, visible))]


class _Gpu(NamedTuple):
    """Row of the output of ``nvidia-smi``."""

    number: str
    uuid: str
    value: str


def _visible(gpus: Sequence[_Gpu], visible: str) -> Sequence[_Gpu]:
    """Return the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` names, in its order: indices, or starts of UUIDs.

    As in CUDA, the first name of no GPU ends the list. ``nvidia-smi`` does not list instances of MIG
    here; a value with their names has no effect.
    """
    if "MIG-" in visible:
        return gpus
    found = []
    for name in (part.strip() for part in visible.split(",")):
        of_name = [gpu for gpu in gpus if gpu.number == name or (name.startswith("GPU-") and gpu.uuid.startswith(name))]
        if not of_name:
            break
        found.append(of_name[0])
    return found
