"""Collect what all workers were doing into one folder."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recipe_gkd.diagnostics.node_agent import GONE, WorkerReport, inspect_here
from recipe_gkd.diagnostics.report import WorkerDiagnostics, render
from recipe_gkd.errors import DeadlineError, UnexpectedError, WeightSyncError, WorkerError, find_timeout_error
from recipe_gkd.ray_cluster.node_probe import locate, run_on_node
from recipe_gkd.runtime.threads import in_thread

if TYPE_CHECKING:
    from recipe_gkd.ray_cluster.worker_group import WorkerGroup

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S = 3.0
"""A run that has failed is to end within seconds of its deadline."""
_TO_COME_BACK_S = 0.5
"""What is kept of it for the last stacks, and for the way from a node."""
_TO_WRITE_S = 0.5
"""What is kept of it for writing."""
_WRITE_S = 2.0
"""What writing gets if it needs more: what was found is not thrown away."""


async def diagnose(
    error: Exception, groups: Sequence[WorkerGroup], root: Path, *, timeout_s: float = TIMEOUT_S
) -> Path | None:
    """Write ``<root>/diagnosis/<time>-<phase>/`` for a deadline, a failed worker or the unexpected; return it.

    ``report.md`` names who answered and who did not, and tells each worker's node, process, state and memory. Beside it
    stand, for each worker, the Python stacks of its process and its children, the ends of its log files, and on CUDA
    the dump of NCCL's flight recorder. None for an error of another kind, and if not even the report could be written.
    Never raises. What is not found out in ``timeout_s`` is left out; a slow disk may take 2 s more.
    """
    if not isinstance(error, DeadlineError | WorkerError | WeightSyncError | UnexpectedError):
        return None
    deadline = time.monotonic() + timeout_s - _TO_WRITE_S
    try:
        subjects = await _locate(groups, deadline)
        await _look(subjects, deadline)
        files = _files(subjects)
        writing = time.monotonic() + _WRITE_S
        folder = await _in_time(writing, _write_report, error, subjects, sorted(files), root)
    except Exception:  # the error itself matters more
        log.warning("the diagnosis failed", exc_info=True)
        return None
    try:
        await _in_time(writing, _write_files, folder, files)
    except Exception:
        log.warning("not all files of the diagnosis in %s could be written", folder, exc_info=True)
    return folder


async def _in_time(deadline: float, act: Callable[..., T], *args: Any) -> T:
    """In a thread, which is left to itself if it takes longer."""
    return await asyncio.wait_for(in_thread(act, *args), max(0.0, deadline - time.monotonic()))


async def _locate(groups: Sequence[WorkerGroup], deadline: float) -> list[WorkerDiagnostics]:
    """All workers, of as many groups as Ray tells of in time."""
    subjects: list[WorkerDiagnostics] = []
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            for group in groups:
                places = await locate(group.handles)
                subjects += [WorkerDiagnostics(group.label(rank), place) for rank, place in enumerate(places)]
    except TimeoutError:
        log.warning("Ray did not tell in time where all workers are")
    return subjects


async def _look(subjects: Sequence[WorkerDiagnostics], deadline: float) -> None:
    """Fill in the reports of all nodes that answer in time."""
    timeout_s = max(0.0, deadline - time.monotonic())
    looks: dict[asyncio.Task[dict[int, WorkerReport]], list[WorkerDiagnostics]] = {}
    for node in {subject.place.node_id for subject in subjects if subject.place.pid}:
        here = [subject for subject in subjects if subject.place.node_id == node and subject.place.pid]
        pids = [subject.place.pid for subject in here]
        look = asyncio.create_task(run_on_node(node, inspect_here, pids, timeout_s - _TO_COME_BACK_S))
        looks[look] = here
    if looks:
        await asyncio.wait(looks, timeout=timeout_s)
    for look, here in looks.items():
        if not look.done():
            look.cancel()
        elif failure := look.exception():
            log.warning("node %s could not be looked into: %s", here[0].place.node_id, failure)
        else:
            for subject in here:
                subject.report = look.result().get(subject.place.pid)


def _files(subjects: Sequence[WorkerDiagnostics]) -> dict[str, bytes]:
    """What stands beside the report: name -> content."""
    files: dict[str, bytes] = {}
    for subject in subjects:
        if (report := subject.report) is None:
            continue
        name = _slug(subject.label.partition(" of ")[0])
        stacks = (
            f"== {process.name or subject.label} (pid {process.pid}): {process.state}\n{process.stacks}"
            for process in report.processes
        )
        if report.processes[0].state != GONE:
            files[f"{name}.stacks.txt"] = "\n".join(stacks).encode(errors="replace")
        if report.logs:
            files[f"{name}.log.txt"] = report.logs.encode()
        files |= {f"{name}.{dump}": content for dump, content in report.nccl_dumps.items()}
    return files


def _write_report(error: Exception, subjects: Sequence[WorkerDiagnostics], files: Sequence[str], root: Path) -> Path:
    """The folder. First, so that it is there even if the disk is too slow for the rest."""
    late = find_timeout_error(error)
    phase = late.phase if late else str(error).partition(":")[0]
    folder = root / "diagnosis" / f"{time.strftime('%Y%m%d-%H%M%S')}-{_slug(phase)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(render(error, subjects, files), errors="replace")
    return folder


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "failure"
