"""The page that a person reads first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from recipe_gkd.diagnostics.node_agent import GONE, WorkerReport
from recipe_gkd.errors import DeadlineError, find_timeout_error
from recipe_gkd.ray_cluster.node_probe import ActorLocation


@dataclass
class WorkerDiagnostics:
    """A worker of which a diagnosis tells; ``report`` is None if its node did not answer."""

    label: str
    place: ActorLocation
    report: WorkerReport | None = None


def render(error: Exception, subjects: Sequence[WorkerDiagnostics], files: Sequence[str]) -> str:
    """Markdown; ``files`` are the names of those that stand beside it."""
    late = find_timeout_error(error) or DeadlineError()
    about = [f"time: {time.strftime('%Y-%m-%d %H:%M:%S %z')}"]
    if late.silent:
        about.append(f"phase: {late.phase}")
        about.append(f"did not answer within {late.waited_s:g} s: {', '.join(late.silent)}")
        about.append(f"answered: {', '.join(late.answered) or 'nobody'}")
    head = ("worker", "asked", "node", "pid", "state", "memory")
    rows: list[tuple[str, ...]] = []
    for subject in sorted(subjects, key=lambda subject: subject.label not in late.silent):
        asked = "silent" if subject.label in late.silent else "answered" if subject.label in late.answered else "-"
        rows += _rows(subject, asked)
    causes = [f"{subject.label}: {subject.place.cause}" for subject in subjects if subject.place.cause]
    parts = [
        "# What the workers were doing",
        "\n".join(f"> {line}" for line in str(error).splitlines()),
        "\n".join(f"- {line}" for line in about),
        "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)),
        *(["What Ray says of the dead:", *causes] if causes else []),
        "Python stacks are in `*.stacks.txt`, the ends of the workers' logs in `*.log.txt`, and what NCCL's flight "
        "recorder has dumped in `*.nccl_<rank>` (read it with `torch.distributed.flight_recorder.fr_trace`).",
        "\n".join(f"- `{file}`" for file in files),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(subject: WorkerDiagnostics, asked: str) -> list[tuple[str, ...]]:
    place = subject.place
    node = f"{place.node_ip} ({place.node_id[:8]})" if place.node_id else "-"
    if not place.pid:
        return [(subject.label, asked, node, "-", "died before it started" if place.dead else "not started", "-")]
    if subject.report is None:
        return [(subject.label, asked, node, str(place.pid), "unknown: its node did not answer", "-")]
    rows: list[tuple[str, ...]] = []
    for i, process in enumerate(subject.report.processes):
        memory = "-" if process.state == GONE else f"{process.memory_bytes / (1 << 20):.0f} MiB"
        who = subject.label if i == 0 else f"  its child {process.name[:40]}".replace("|", "/")
        rows.append((who, asked if i == 0 else "", node, str(process.pid), process.state, memory))
    return rows
