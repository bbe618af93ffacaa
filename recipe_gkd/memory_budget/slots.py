"""Memory of a slot on this machine, before any worker has started. Creates no CUDA context."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from teacher.common.sizes import MIB

_QUERY_TIMEOUT_S = 60.0
"""Deadline of the query. Without the persistence daemon it takes seconds per GPU."""
_CGROUPS = Path("/sys/fs/cgroup")


def slot_memory(device: str, n_slots: int) -> int | None:
    """Return the most memory that each slot of this machine can have, in bytes; None if it is unknown.

    Args:
        device: ``"cuda"`` for the memory of a GPU. If there are more GPUs than slots, the largest are used, and the
            smallest of these counts. ``"cpu"`` for an equal part of the memory that the processes may use.
    """
    if device == "cpu":
        return min([psutil.virtual_memory().total, *_cgroup_limits()]) // n_slots
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


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits of this process's control groups and of those around them; nothing without a limit."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    folders = [(_CGROUPS, "memory.max"), (_CGROUPS / "memory", "memory.limit_in_bytes")]
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root, name = folders[bool(controllers)]  # version 2 lists no controllers
            own = Path(path.lstrip("/"))
            folders += [(root / part, name) for part in (own, *own.parents)]
    for folder, name in folders:
        try:
            limit = (folder / name).read_text(encoding="ascii").strip()
        except OSError:  # in a container the path of the group is the host's
            continue
        if limit.isdigit():
            yield int(limit)
