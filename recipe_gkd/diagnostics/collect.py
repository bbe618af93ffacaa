"""Collection of the state of all workers into one folder after a failure."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from recipe_gkd.diagnostics.node_agent import GONE, WorkerReport, inspect_workers
from recipe_gkd.diagnostics.report import WorkerDiagnostics, render
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import DeadlineError, GkdError, UnexpectedError, WeightSyncError, WorkerError, find_timeout_error
from recipe_gkd.ray_cluster.node_probe import locate, run_on_node
from recipe_gkd.runtime.threads import in_thread

if TYPE_CHECKING:
    from recipe_gkd.ray_cluster.worker_group import WorkerGroup

log = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TIMEOUT_S = 3.0
"""Deadline of a diagnosis. A failed run must end within seconds."""
_RETURN_MARGIN_S = 0.5
"""Part of the deadline that is reserved for late stacks and for the transfer from a node."""
_WRITE_MARGIN_S = 0.5
"""Part of the deadline that is reserved for writing the files."""
_WRITE_TIMEOUT_S = 2.0
"""Deadline of writing, which may exceed the deadline of the diagnosis so that collected data is not lost."""


async def diagnose(
    error: Exception, groups: Sequence[WorkerGroup[object]], root: Path, *, timeout_s: float = TIMEOUT_S
) -> Path | None:
    """Write a diagnosis of all workers to ``<root>/diagnosis/<time>-<phase>/``.

    ``report.md`` lists the workers that answered and those that did not, with node, process, state and memory. For each
    worker, further files contain the Python stacks of its process and its children, the ends of its log files, and on
    CUDA the dump of NCCL's flight recorder. Never raises.

    Args:
        error: Error that ended the run. Only missed deadlines, failed workers, failed weight syncs and unexpected
            errors are diagnosed.
        groups: Worker pools of the run.
        root: Folder of the run.
        timeout_s: Deadline. Data that is not collected by then is left out. A slow disk may take 2 s more.

    Returns:
        The folder. None for an error of another kind, or if the report could not be written.
    """
    if not isinstance(error, DeadlineError | WorkerError | WeightSyncError | UnexpectedError):
        return None
    deadline = time.monotonic() + timeout_s - _WRITE_MARGIN_S
    try:
        workers = await _locate(groups, deadline)
        await _inspect(workers, deadline)
        files = _build_files(workers)
        write_deadline = time.monotonic() + _WRITE_TIMEOUT_S
        folder = await _in_thread_until(write_deadline, _write_report, error, workers, sorted(files), root)
    except Exception:  # The error that is diagnosed matters more than a failed diagnosis.
        log.warning("the diagnosis failed", exc_info=True)
        return None
    try:
        await _in_thread_until(write_deadline, _write_files, folder, files)
    except Exception:
        log.warning("not all files of the diagnosis in %s could be written", folder, exc_info=True)
    return folder


async def with_diagnosis(error: Exception, phase: str, groups: Sequence[WorkerGroup[object]], root: Path) -> Exception:
    """Save the state of all workers, and return the error to raise, with its cause and the folder as ``diagnosis``."""
    known = as_known_error(error, phase)
    folder = await diagnose(known, groups, root)
    if folder is None:
        return known
    diagnosed = known.replaced(diagnosis=folder)
    diagnosed.__cause__ = error
    return diagnosed


async def _in_thread_until(deadline: float, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return ``function(*args)``, computed in a thread. Abandon the thread at the deadline."""
    return await asyncio.wait_for(in_thread(function, *args), max(0.0, deadline - time.monotonic()))


async def _locate(groups: Sequence[WorkerGroup[object]], deadline: float) -> list[WorkerDiagnostics]:
    """Return the workers of all groups that Ray locates before the deadline."""
    workers: list[WorkerDiagnostics] = []
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            for group in groups:
                locations = await locate(group.handles)
                workers += [WorkerDiagnostics(group.label(rank), at) for rank, at in enumerate(locations)]
    except TimeoutError:
        log.warning("Ray did not locate all workers in time; the diagnosis contains only %d of them", len(workers))
    return workers


async def _inspect(workers: Sequence[WorkerDiagnostics], deadline: float) -> None:
    """Set the reports of the workers on all nodes that answer before the deadline."""
    timeout_s = max(0.0, deadline - time.monotonic())
    by_node: dict[str, list[WorkerDiagnostics]] = {}
    for worker in workers:
        if worker.location.pid:
            by_node.setdefault(worker.location.node_id, []).append(worker)
    tasks: dict[asyncio.Task[dict[int, WorkerReport]], str] = {}
    for node_id, on_node in by_node.items():
        pids = [worker.location.pid for worker in on_node]
        call = run_on_node(node_id, inspect_workers, pids, timeout_s - _RETURN_MARGIN_S)
        tasks[asyncio.create_task(call)] = node_id
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
    for task, node_id in tasks.items():
        if not task.done():
            task.cancel()
        elif failure := task.exception():
            log.warning("workers on node %s could not be inspected: %s", node_id, failure)
        else:
            for worker in by_node[node_id]:
                worker.report = task.result().get(worker.location.pid)


def _build_files(workers: Sequence[WorkerDiagnostics]) -> dict[str, bytes]:
    """Return file name -> content of the files beside the report."""
    files: dict[str, bytes] = {}
    for worker in workers:
        if (report := worker.report) is None:
            continue
        name = _slug(worker.label.partition(" of ")[0])
        stacks = (
            f"== {process.name or worker.label} (pid {process.pid}): {process.state}\n{process.stacks}"
            for process in report.processes
        )
        if report.processes[0].state != GONE:
            files[f"{name}.stacks.txt"] = "\n".join(stacks).encode(errors="replace")
        if report.logs:
            files[f"{name}.log.txt"] = report.logs.encode()
        files |= {f"{name}.{dump}": content for dump, content in report.nccl_dumps.items()}
    return files


def _write_report(error: Exception, workers: Sequence[WorkerDiagnostics], files: Sequence[str], root: Path) -> Path:
    """Write ``report.md`` and return its folder. It is written first in case the disk is too slow for the rest."""
    known = find_timeout_error(error) or error
    phase = known.phase if isinstance(known, GkdError) else ""
    folder = root / "diagnosis" / f"{time.strftime('%Y%m%d-%H%M%S')}-{_slug(phase)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(render(error, workers, files), errors="replace")
    return folder


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "failure"
