"""Spans of all workers in the last steps of a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from recipe_gkd.commands.report.run_files import Run
from recipe_gkd.metrics.run_events import END, START
from recipe_gkd.metrics.trace import POOLS

MAX_BYTES = 8 << 20
"""Bytes that are read from the start of a trace file, for the names of the workers, and from its end."""
MAX_CLOCK_DIFFERENCE_S = 60.0
"""Maximum difference between the clocks of a host and of its file system."""
N_UPDATES = 8
MAX_ROWS = 28
MAX_SPANS_OF_ROW = 4000 // MAX_ROWS * 4


@dataclass(frozen=True, kw_only=True)
class Span:
    """Interval of work.

    Attributes:
        row: Process and thread in the trace file.
        start: Start in seconds.
        end: End in seconds.
    """

    row: tuple[int, int]
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TraceWindow:
    """Spans of the last updates.

    Attributes:
        source: Name of the trace file.
        start: Start in seconds.
        end: End in seconds.
        rows: Name of the worker and spans of each row. Overlapping spans of a worker have several rows.
    """

    source: str
    start: float
    end: float
    rows: Sequence[tuple[str, Sequence[Span]]]


def find_trace(run: Run) -> Path | None:
    """Return the trace file of a run: the configured one, or ``trace.json`` in its folder. None if absent.

    A file outside of the run folder is left out if another run has written it.
    """
    inside = run.folder / "trace.json"
    if setting := run.setting("trainer.trace_file"):
        path = run.folder / Path(str(setting)).expanduser()
        is_inside = path.resolve().is_relative_to(run.folder.resolve())
        if path.is_file() and (is_inside or _is_written_during(run.events, path)):
            return path
    return inside if inside.is_file() else None


def _is_written_during(events: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Return True if the run was in progress at the last change of a file, or its events are unknown."""
    changed, started = path.stat().st_mtime, None
    for event in events:
        at = datetime.fromisoformat(event["time"]).timestamp()
        if event["event"] not in (START, END):
            continue
        if started is not None and started <= changed <= at + MAX_CLOCK_DIFFERENCE_S:
            return True
        started = at if event["event"] == START else None
    return not events or (started is not None and started <= changed)


def read_timeline(path: Path) -> TraceWindow | None:
    """Return the last updates in a trace file. None if it has no spans, or a new start has renamed it meanwhile."""
    try:
        names, spans = read_spans(path)
    except OSError:
        return None
    start, end = last_updates(spans)
    shown = sorted((span for span in spans if span.end > start and span.start < end), key=lambda span: span.start)
    rows = sorted({span.row for span in shown}, key=lambda row: _order(names, row))[:MAX_ROWS]
    by_row = [
        (names.get(row, "").partition(" (")[0], [span for span in shown if span.row == row][:MAX_SPANS_OF_ROW])
        for row in rows
    ]
    return TraceWindow(path.name, start, end, by_row) if rows else None


def read_spans(path: Path) -> tuple[dict[tuple[int, int], str], list[Span]]:
    """Return the names of all workers, and the complete spans in the end of a trace file."""
    names: dict[tuple[int, int], str] = {}
    spans: list[Span] = []
    opened: dict[tuple[int, int], tuple[str, float]] = {}
    for event in _events(path):
        row = (event.get("pid", 0), event.get("tid", 0))
        phase, at = event.get("ph"), event.get("ts", 0.0) / 1e6
        if phase == "M" and event.get("name") == "thread_name":
            names[row] = str(event["args"]["name"])
        elif phase == "B":
            opened[row] = (str(event["name"]), at)
        elif phase == "E" and row in opened:
            name, start = opened.pop(row)
            spans.append(Span(row=row, name=name, start=start, end=at))
        elif phase == "X":
            spans.append(Span(row=row, name=str(event["name"]), start=at, end=at + event.get("dur", 0.0) / 1e6))
    return names, spans


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events at the start and at the end of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size > 2 * MAX_BYTES:
            yield from (event for event in _parse(file.read(MAX_BYTES).splitlines()[:-1]) if event.get("ph") == "M")
            file.seek(size - MAX_BYTES)
            file.readline()
        yield from _parse(file)


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line.strip().rstrip(b","))
        except ValueError:  # the brackets of the array, or the last line of a killed run
            continue
        if isinstance(event, dict):
            yield event


def last_updates(spans: list[Span]) -> tuple[float, float]:
    """Return start and end, in seconds, of the last updates, if possible without a validation or checkpoint."""
    updates = sorted((span for span in spans if span.name.startswith("update")), key=lambda span: span.start)
    pauses = [span for span in spans if span.name.startswith(("validate", "save_checkpoint"))]
    if len(updates) < 2:
        return (min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0))
    for last in range(len(updates) - 1, N_UPDATES - 1, -1):
        start, end = updates[last - N_UPDATES].end, updates[last].end
        if not any(pause.start < end and pause.end > start for pause in pauses):
            return start, end
    return updates[max(0, len(updates) - 1 - N_UPDATES)].end, updates[-1].end


def _order(names: dict[tuple[int, int], str], row: tuple[int, int]) -> tuple[int, int, int, tuple[int, int]]:
    """Return the position of a row: pools as in the trace file, then the number of the worker."""
    pool, _, rest = names.get(row, "").partition(" ")
    digits = [int(part) for part in rest.replace("(", "").replace(")", "").split() if part.isdigit()]
    return (POOLS.index(pool) if pool in POOLS else len(POOLS), row[0], digits[0] if digits else 0, row)
