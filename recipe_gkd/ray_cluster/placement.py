"""Devices and nodes that the workers really got, and checks that these are as configured."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import psutil

from recipe_gkd.errors import ConfigError, ResourceError
from recipe_gkd.runtime.remote_group import OnResult
from teacher.common.sizes import GIB

if TYPE_CHECKING:
    from recipe_gkd.ray_cluster.worker_group import WorkerGroup


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """Node and devices of a worker's process.

    Attributes:
        node: Host name.
        node_id: Ray's id of the node; None without Ray. A host may run several nodes.
        node_ip: Ray's address of the node; None without Ray.
        host_memory: Memory of the host, in bytes.
        devices: UUIDs of the visible GPUs; empty on a CPU.
        device: Description of the devices for tables and messages.
        device_memory: Memory of all visible GPUs, in bytes.
        visible: ``CUDA_VISIBLE_DEVICES`` as a list; None if it is not set.
        assigned: Ids of the GPUs that Ray assigned to this process; None without Ray.
    """

    node: str
    node_id: str | None = None
    node_ip: str | None = None
    host_memory: int
    devices: Sequence[str] = ()
    device: str = "cpu"
    device_memory: int = 0
    visible: Sequence[str] | None = None
    assigned: Sequence[str] | None = None

    @property
    def full_node(self) -> str:
        """Name of the node for messages."""
        return f"{self.node} {self.node_ip} ({self.node_id[:8]})" if self.node_id else self.node


Reports = Mapping[str, DeviceReport]
"""Label of a worker, such as ``rollout worker 0 of 2`` -> its report."""


class DeviceOwner(Protocol):
    """Worker that reports its devices."""

    def device_report(self) -> DeviceReport:
        """Return the node and the devices of this worker; see :func:`device_report`."""


def device_report(device: str) -> DeviceReport:
    """Return the node and the devices of this process.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    report = DeviceReport(
        node=socket.gethostname(),
        host_memory=psutil.virtual_memory().total,
        visible=None if visible is None else [one.strip() for one in visible.split(",") if one.strip()],
    )
    if device == "cuda":
        import torch

        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        report = replace(
            report,
            devices=[str(gpu.uuid) for gpu in gpus],
            device=", ".join(f"{gpu.name} {str(gpu.uuid)[:8]}" for gpu in gpus) or "no GPU",
            device_memory=sum(gpu.total_memory for gpu in gpus),
        )
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return report
    context = ray.get_runtime_context()
    return replace(
        report,
        node_id=context.get_node_id(),
        node_ip=ray.util.get_node_ip_address(),
        assigned=context.get_accelerator_ids().get("GPU", []),
    )


async def collect_device_reports(
    groups: Sequence[WorkerGroup[DeviceOwner]],
    *,
    timeout_s: float,
    on_result: Mapping[str, OnResult] | None = None,
) -> Reports:
    """Return the result of every worker's ``device_report()``. All workers are called at the same time.

    Args:
        on_result: Name of a group -> function that is called with the rank of each worker that has answered.

    Raises:
        DeadlineError: A worker did not answer within ``timeout_s``.
        WorkerError: A worker failed.
    """
    phase, reported = "start, read device reports", on_result or {}
    calls = (
        group.call(DeviceOwner.device_report, timeout_s=timeout_s, phase=phase, on_result=reported.get(group.name))
        for group in groups
    )
    return {
        group.label(rank): report
        for group, reports in zip(groups, await asyncio.gather(*calls), strict=True)
        for rank, report in enumerate(reports)
    }


async def environments_of_guests(
    actors: WorkerGroup[DeviceOwner], *, n_guests: int, timeout_s: float
) -> dict[int, dict[str, str]]:
    """Return the variable that makes the GPUs of its actor ranks visible to each rollout worker, by rank.

    Args:
        actors: Actor ranks, which hold the GPUs (``hybrid_engine``).
        n_guests: Number of rollout workers. Each uses the GPUs of equally many consecutive actor ranks.

    Raises:
        DeadlineError: An actor worker did not answer.
        WorkerError: An actor worker failed.
    """
    phase = "start, read device reports"
    reports = await actors.call(DeviceOwner.device_report, timeout_s=timeout_s, phase=phase)
    gpus = [gpu for report in reports for gpu in report.assigned or ()]
    each = len(gpus) // n_guests
    return {rank: {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * each : (rank + 1) * each])} for rank in range(n_guests)}


def placement_table(reports: Reports) -> str:
    """Return an aligned text table with one row per worker: pool, worker, node, device, memory."""
    rows = [("pool", "worker", "node", "device", "memory")]
    for label, report in reports.items():
        pool, _, worker = label.partition(" worker ")
        rows.append((pool, worker, report.full_node, report.device, _memory(report)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def check_devices(reports: Reports, *, is_hybrid: bool = False) -> None:
    """Check that every worker has the GPUs that Ray assigned to it, and that no two workers share one by mistake.

    Args:
        is_hybrid: True if each GPU belongs to one actor worker and one rollout worker (``hybrid_engine``).

    Raises:
        ResourceError: Two workers got one GPU, a worker sees other GPUs than Ray assigned to it, or with ``is_hybrid``
            a GPU has only one worker.
    """
    owners: dict[tuple[str, str], list[str]] = {}
    for label, report in reports.items():
        if not (is_hybrid and label.startswith("rollout ")):  # a guest, to which Ray assigned nothing
            _check_assigned(label, report)
        for device in report.devices:
            owners.setdefault((report.node_id or report.node, device), []).append(label)
    for (_, device), labels in owners.items():
        pools = [label.partition(" worker ")[0] for label in labels]
        node = reports[labels[0]].full_node
        if len(labels) > 1 and not (is_hybrid and len(set(pools)) == len(pools)):
            raise ResourceError(
                f"{' and '.join(labels)} all got {device} on node {node}, expected a GPU for each",
                node=node,
                workers=tuple(labels),
                remedy="check if CUDA_VISIBLE_DEVICES is set by hand, or if another job uses these GPUs",
            )
        if is_hybrid and len(labels) == 1:
            raise ResourceError(
                f"{labels[0]} is the only worker on {device} of node {node}, but with "
                "actor_rollout_ref.hybrid_engine=true an actor worker and a rollout worker share each GPU",
                node=node,
                workers=tuple(labels),
                remedy="check if CUDA_VISIBLE_DEVICES is set by hand",
            )


def check_transport(reports: Reports, transport: str) -> None:
    """Check that all workers are on one node if weights are sent through its shared memory.

    Args:
        transport: ``actor_rollout_ref.rollout.weight_transport``.

    Raises:
        ConfigError: The transport is ``ipc``, and the workers are on several nodes.
    """
    if transport != "ipc":
        return
    nodes = sorted({report.full_node for report in reports.values()})
    if len(nodes) > 1:
        raise ConfigError(
            "actor_rollout_ref.rollout.weight_transport=ipc sends weights through the shared memory of one node, but "
            f"the workers are on the nodes {', '.join(nodes)}",
            keys=("actor_rollout_ref.rollout.weight_transport",),
            remedy="set it to collective or auto",
        )


def _check_assigned(label: str, report: DeviceReport) -> None:
    assigned, devices, visible = report.assigned, report.devices, report.visible
    # A worker on a CPU is assigned no GPU, and sees none.
    if assigned is None or (report.device == "cpu" and not devices):
        return
    has_other_gpus = visible is None or set(visible) != set(assigned)
    if has_other_gpus or len(devices) != len(assigned):
        raise ResourceError(
            f"on node {report.full_node} Ray assigned GPU {', '.join(assigned) or 'none'}, but "
            f"CUDA_VISIBLE_DEVICES={'(not set)' if visible is None else ','.join(visible)} and torch sees "
            f"{len(devices)} GPUs ({report.device})",
            worker=label,
            node=report.full_node,
            workers=(label,),
            remedy="remove CUDA_VISIBLE_DEVICES and RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES from the environment "
            "of Ray and of the command, and check `nvidia-smi` on that node",
        )


def _memory(report: DeviceReport) -> str:
    host = f"{report.host_memory / GIB:.1f} GiB host"
    return f"{report.device_memory / GIB:.1f} GiB GPU, {host}" if report.device_memory else host
