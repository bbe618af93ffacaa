"""Where a worker really is, whatever it was promised; and whether that is where it should be."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from recipe_gkd.errors import ResourceError

if TYPE_CHECKING:
    from recipe_gkd.ray_cluster.worker_group import WorkerGroup

Reports = Mapping[str, Mapping[str, Any]]
"""Label of a worker, as ``rollout worker 0 of 2`` -> what :func:`device_report` says there."""


def device_report(device: str) -> dict[str, Any]:
    """Of this process, on ``device`` (`cpu` or `cuda`):

    `node` (host name), `node_id` and `node_ip` (Ray's; a host may be several nodes), `pid`, `host_memory` (bytes),
    `devices` (the GPUs' unique ids, none on a CPU), `device` (for people), `device_memory` (bytes of all its GPUs),
    `visible` (CUDA_VISIBLE_DEVICES as a list), and `given`: the GPUs that Ray gave it. Without Ray there is no node id
    and no address, and `given` is None.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    place: dict[str, Any] = {
        "node": socket.gethostname(),
        "pid": os.getpid(),
        "host_memory": psutil.virtual_memory().total,
        "devices": [],
        "device": "cpu",
        "device_memory": 0,
        "visible": None if visible is None else [one.strip() for one in visible.split(",") if one.strip()],
    }
    if device == "cuda":
        import torch

        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        place["devices"] = [str(gpu.uuid) for gpu in gpus]
        place["device"] = ", ".join(f"{gpu.name} {str(gpu.uuid)[:8]}" for gpu in gpus) or "no GPU"
        place["device_memory"] = sum(gpu.total_memory for gpu in gpus)
    return place | _by_ray()


def _by_ray() -> dict[str, Any]:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {"node_id": None, "node_ip": None, "given": None}
    context = ray.get_runtime_context()
    return {
        "node_id": context.get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "given": context.get_accelerator_ids().get("GPU", []),
    }


async def collect_device_reports(groups: Sequence[WorkerGroup], *, timeout_s: float) -> Reports:
    """What each worker's ``where()`` says; all are asked at the same time, as soon as their processes run."""
    calls = (group.call("where", timeout_s=timeout_s, phase="start, look at the devices") for group in groups)
    return {
        group.label(rank): report
        for group, own in zip(groups, await asyncio.gather(*calls), strict=True)
        for rank, report in enumerate(own)
    }


def placement_table(reports: Reports) -> str:
    """One row a worker: pool, worker, node, device, memory."""
    rows = [("pool", "worker", "node", "device", "memory")]
    for label, report in reports.items():
        pool, _, worker = label.partition(" worker ")
        rows.append((pool, worker, _node(report), str(report["device"]), _memory(report)))
    return _aligned(rows)


def check_devices(reports: Reports, *, shared: bool = False) -> None:
    """Raise :class:`ResourceError` if two workers got one GPU, or one sees another set of GPUs than Ray gave it.

    ``shared``: an actor and a rollout worker may, and must, have one GPU between them.
    """
    owners: dict[tuple[str, str], list[str]] = {}
    for label, report in reports.items():
        _check_given(label, report)
        for device in report["devices"]:
            owners.setdefault((report.get("node_id") or report["node"], device), []).append(label)
    for (_, device), labels in owners.items():
        pools = [label.partition(" worker ")[0] for label in labels]
        if len(labels) > 1 and not (shared and len(set(pools)) == len(pools)):
            raise ResourceError(
                f"{' and '.join(labels)} all got {device} on node {_node(reports[labels[0]])}; "
                "look for CUDA_VISIBLE_DEVICES set by hand, or for a second job on these GPUs"
            )
        if shared and len(labels) == 1:
            raise ResourceError(
                f"{labels[0]} has {device} on node {_node(reports[labels[0]])} for itself, but with "
                "rollout.share_actor_gpus=true an actor and a rollout worker have each GPU together; "
                "look for CUDA_VISIBLE_DEVICES set by hand"
            )


def _check_given(label: str, report: Mapping[str, Any]) -> None:
    """A worker that asked Ray for no GPU is on a CPU, and sees none."""
    given, devices, visible = report.get("given"), report["devices"], report.get("visible")
    if given is None or (report["device"] == "cpu" and not devices):
        return
    other_ones = visible is None or set(visible) != set(given)
    if other_ones or len(devices) != len(given):
        raise ResourceError(
            f"{label} on node {_node(report)}: Ray gave it GPU {', '.join(given) or 'none'}, but "
            f"CUDA_VISIBLE_DEVICES={'(not set)' if visible is None else ','.join(visible)} and torch sees "
            f"{len(devices)} GPUs ({report['device']}); remove CUDA_VISIBLE_DEVICES and "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES from the environment of Ray and of the command, and see "
            "`nvidia-smi` on that node"
        )


def _node(report: Mapping[str, Any]) -> str:
    node_id = report.get("node_id")
    return f"{report['node']} {report['node_ip']} ({node_id[:8]})" if node_id else str(report["node"])


def _memory(report: Mapping[str, Any]) -> str:
    host = f"{report['host_memory'] / (1 << 30):.1f} GiB host"
    return f"{report['device_memory'] / (1 << 30):.1f} GiB GPU, {host}" if report["device_memory"] else host


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
