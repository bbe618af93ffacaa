"""Spans of all workers in the last steps of a trace file, as a chart with one row per worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.commands.report.markup import VIEW, text
from recipe_gkd.commands.report.series import duration, number, ticks
from recipe_gkd.metrics.trace import POOLS

MAX_BYTES = 8 << 20
"""Bytes that are read from the start of a trace file, for the names of the workers, and from its end."""
N_UPDATES = 8
MAX_ROWS = 28
MAX_SPANS = 4000
COLORS = {"update": 1, "generate": 2, "score": 3, "sync": 4, "compute": 5, "validate": 6, "save_checkpoint": 7}
"""Color of each span by the first word of its name. Waits have their own color; others are gray."""


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


def find_trace(run: Path, setting: object) -> Path | None:
    """Return the trace file of a run: the configured one, or ``trace.json`` in its folder. None if absent."""
    candidates = [Path(str(setting)).expanduser()] if setting else []
    return next((path for path in [*candidates, run / "trace.json"] if path.is_file()), None)


def trace_chart(path: Path) -> str:
    """Return the chart as HTML. Empty if the file has no spans."""
    names, spans = read_spans(path)
    window = last_updates(spans)
    shown = sorted((span for span in spans if span.end > window[0] and span.start < window[1]), key=lambda s: s.start)
    rows = sorted({span.row for span in shown}, key=lambda row: _order(names, row))[:MAX_ROWS]
    if not rows:
        return ""
    by_row = {row: [span for span in shown if span.row == row] for row in rows}
    bands = "".join(
        _row(names.get(row, ""), by_row[row], window, is_first) for row, is_first in _first_of_track(names, rows)
    )
    length = window[1] - window[0]
    axis = "".join(
        f'<span class="{"start" if at == 0 else ""}" style="left:{100 * at / length:.2f}%">{number(at)} s</span>'
        for at in ticks(0, length, 7)
        if at <= length * 0.97
    )
    kinds = [kind for kind in [*COLORS, "wait"] if any(span.name.startswith(kind) for span in shown)]
    legend = "".join(f'<li><i style="--c:var(--s{COLORS.get(kind, 8)})"></i>{text(_kind(kind))}</li>' for kind in kinds)
    return (
        '<figure class="card gantt"><figcaption><h3>Timeline of the last steps</h3>'
        f"<p>{duration(length)} from {text(path.name)}. Each row is a worker. Pipelined stages overlap.</p>"
        f'<ul class="legend">{legend}</ul></figcaption><div class="rows">{bands}</div>'
        f'<div class="axis" aria-hidden="true">{axis}</div></figure>'
    )


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


def _first_of_track(
    names: dict[tuple[int, int], str], rows: list[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], bool]]:
    """Yield each row, and True if it is the first of its worker. Overlapping spans of a worker have several rows."""
    previous = None
    for row in rows:
        track = names.get(row, "").partition(" (")[0]
        yield row, track != previous
        previous = track


def _row(name: str, spans: list[Span], window: tuple[float, float], is_first: bool) -> str:
    scale = VIEW / (window[1] - window[0])
    bars = "".join(
        f'<rect style="--c:var(--s{_color(span.name)})" x="{max(0.0, (span.start - window[0]) * scale):.1f}" y="0" '
        f'width="{_width(span, window) * scale:.1f}" height="10" data-n="{text(span.name.replace("_", " "))}" '
        f'data-s="{duration(span.end - span.start)}"/>'
        for span in spans[: MAX_SPANS // MAX_ROWS * 4]
    )
    label = text(name.partition(" (")[0]) if is_first else ""
    frame = f'viewBox="0 0 {VIEW} 10" preserveAspectRatio="none" role="img" aria-label="{text(name)}"'
    return f'<div class="row{" first" if is_first else ""}"><span>{label}</span><svg {frame}>{bars}</svg></div>'


def _width(span: Span, window: tuple[float, float]) -> float:
    return max(min(span.end, window[1]) - max(span.start, window[0]), (window[1] - window[0]) / VIEW)


def _color(name: str) -> int:
    return COLORS.get(name.split(" ")[0], 8)


def _kind(kind: str) -> str:
    return {
        "compute": "reward",
        "save_checkpoint": "checkpoint",
        "score": "score (teacher)",
        "wait": "wait (trainer)",
    }.get(kind, kind)
