"""The summary page of a diagnosis, ``report.md``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from recipe_gkd.diagnostics.node_agent import GONE, WorkerReport
from recipe_gkd.errors import DeadlineError, find_timeout_error
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from teacher.common.sizes import MIB


@dataclass
class WorkerDiagnostics:
    """A worker in a diagnosis.

    Attributes:
        label: Name of the worker, such as ``rollout worker 0 of 2``.
        location: Its node and process.
        report: State of its processes. None if its node did not answer.
    """

    label: str
    location: ActorLocation
    report: WorkerReport | None = None


def render(error: Exception, workers: Sequence[WorkerDiagnostics], files: Sequence[str]) -> str:
    """Return the page as Markdown.

    Args:
        error: Error that ended the run.
        workers: All workers. Those that did not answer come first on the page.
        files: Names of the other files of the diagnosis.
    """
    late = find_timeout_error(error) or DeadlineError()
    facts = [f"time: {time.strftime('%Y-%m-%d %H:%M:%S %z')}"]
    if late.silent:
        facts.append(f"phase: {late.phase}")
        facts.append(f"did not answer within {late.waited_s:g} s: {', '.join(late.silent)}")
        facts.append(f"answered: {', '.join(late.answered) or 'none'}")
    header = ("worker", "call", "node", "pid", "state", "memory")
    rows: list[tuple[str, ...]] = []
    for worker in sorted(workers, key=lambda worker: worker.label not in late.silent):
        call = "silent" if worker.label in late.silent else "answered" if worker.label in late.answered else "-"
        rows += _rows(worker, call)
    causes = [f"{worker.label}: {worker.location.cause}" for worker in workers if worker.location.cause]
    sections = [
        "# State of the workers",
        "\n".join(f"> {line}" for line in str(error).splitlines()),
        "\n".join(f"- {line}" for line in facts),
        "\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)),
        *(["Ray's explanation of the deaths:", *causes] if causes else []),
        "`*.stacks.txt` contains Python stacks, `*.log.txt` the ends of the workers' logs, and `*.nccl_<rank>` the "
        "dumps of NCCL's flight recorder (read them with `torch.distributed.flight_recorder.fr_trace`).",
        "\n".join(f"- `{file}`" for file in files),
    ]
    return "\n\n".join(sections) + "\n"


def _rows(worker: WorkerDiagnostics, call: str) -> list[tuple[str, ...]]:
    """Return the table rows of a worker: its own process first, then its children."""
    location = worker.location
    node = f"{location.node_ip} ({location.node_id[:8]})" if location.node_id else "-"
    if not location.pid:
        return [(worker.label, call, node, "-", "died before it started" if location.dead else "not started", "-")]
    if worker.report is None:
        return [(worker.label, call, node, str(location.pid), "unknown: its node did not answer", "-")]
    rows: list[tuple[str, ...]] = []
    for i, process in enumerate(worker.report.processes):
        memory = "-" if process.state == GONE else f"{process.memory_bytes / MIB:.0f} MiB"
        name = worker.label if i == 0 else f"  its child {process.name[:40]}".replace("|", "/")
        rows.append((name, call if i == 0 else "", node, str(process.pid), process.state, memory))
    return rows
