"""Device reports of workers, as :func:`recipe_gkd.ray_cluster.placement.device_report` returns them."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


def worker_report(
    gpus: list[str], *, node: str = "a", assigned: list[str] | None = None, visible: list[str] | None = None
) -> dict[str, Any]:
    """Return the report of a worker that sees the GPUs ``GPU-<n>``. By default, Ray assigned exactly these to it."""
    return dict(
        node=node,
        node_id=node * 40,
        node_ip="10.0.0.1",
        devices=[f"GPU-{gpu}" for gpu in gpus],
        device=", ".join(f"H200 GPU-{gpu}" for gpu in gpus) or "cpu",
        device_memory=len(gpus) * 141 * GIB,
        host_memory=512 * GIB,
        assigned=gpus if assigned is None else assigned,
        visible=gpus if visible is None else visible,
    )
