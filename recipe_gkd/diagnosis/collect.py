"""Collect what all workers were doing into one folder."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipe_gkd.diagnosis.on_node import GONE, WorkerReport
from recipe_gkd.diagnosis.processes import inspect_here, locate, run_on_node
from recipe_gkd.diagnosis.report import Subject, render
from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError, WorkerError

if TYPE_CHECKING:
    from recipe_gkd.groups import WorkerGroup

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
"""A run that has failed is to end within seconds of its deadline."""
_TO_WRITE_S = 0.5


async def diagnose(
    error: GkdError, groups: Sequence[WorkerGroup], root: Path, *, timeout_s: float = TIMEOUT_S
) -> Path | None:
    """Write ``<root>/diagnosis/<time>-<phase>/`` about a deadline or a failed worker; the folder.

    ``report.md`` names who answered and who did not, and tells each worker's node, process, state and memory. Beside it
    stand, for each worker, the Python stacks of its process and its children, the ends of its log files, and on CUDA
    the dump of NCCL's flight recorder. None for an error of another kind. Never raises; ends within ``timeout_s``.
    """
    if not isinstance(error, DeadlineError | WorkerError | WeightSyncError):
        return None
    try:
        async with asyncio.timeout(timeout_s):
            subjects = [
                Subject(group.label(rank), place)
                for group in groups
                for rank, place in enumerate(await locate(group.handles))
            ]
            await _look(subjects, timeout_s - _TO_WRITE_S)
            return await asyncio.to_thread(_write, error, subjects, root)
    except Exception:  # the error itself matters more
        log.warning("the diagnosis failed", exc_info=True)
        return None


async def _look(subjects: Sequence[Subject], timeout_s: float) -> None:
    """Fill in the reports of all nodes that answer in time."""
    looks: dict[asyncio.Task[dict[int, WorkerReport]], list[Subject]] = {}
    for node in {subject.place.node_id for subject in subjects if subject.place.pid}:
        here = [subject for subject in subjects if subject.place.node_id == node and subject.place.pid]
        pids = [subject.place.pid for subject in here]
        look = asyncio.create_task(run_on_node(node, inspect_here, pids, timeout_s - _TO_WRITE_S))
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


def _write(error: GkdError, subjects: Sequence[Subject], root: Path) -> Path:
    blamed = _origin(error)
    phase = getattr(blamed, "phase", "") or str(error).partition(":")[0]
    folder = root / "diagnosis" / f"{time.strftime('%Y%m%d-%H%M%S')}-{_slug(phase)}"
    folder.mkdir(parents=True, exist_ok=True)
    for subject in subjects:
        if (report := subject.report) is None:
            continue
        name = _slug(subject.label.partition(" of ")[0])
        stacks = (
            f"== {process.name or subject.label} (pid {process.pid}): {process.state}\n{process.stacks}"
            for process in report.processes
        )
        if report.processes[0].state != GONE:
            (folder / f"{name}.stacks.txt").write_text("\n".join(stacks))
        if report.logs:
            (folder / f"{name}.log.txt").write_text(report.logs)
        for dump, content in report.nccl_dumps.items():
            (folder / f"{name}.{dump}").write_bytes(content)
    (folder / "report.md").write_text(
        render(error, blamed, subjects, files=sorted(file.name for file in folder.iterdir()))
    )
    return folder


def _origin(error: BaseException) -> BaseException:
    """Of the errors that led to this one, the one that knows the phase; else the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "phase", ""):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "failure"
