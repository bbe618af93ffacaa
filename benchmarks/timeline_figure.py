"""Draw a few seconds of a run's trace as an SVG timeline.

    python benchmarks/timeline_figure.py TRACE.json --out docs/figures/one_step_off.svg --first-step 20 --seconds 2

``trainer.trace_file=TRACE.json`` writes the trace. One row per worker; a bar per span. The color of a bar is its
batch, so that the overlap of generation, teacher and training is visible.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
SYNC_COLOR = "#9d9d9d"
SHOWN = {"generate": "generate", "score": "teacher", "update": "update", "sync": "weight sync"}
LEFT_PX, WIDTH_PX, ROW_PX, TOP_PX = 110, 860, 30, 46


@dataclass(frozen=True)
class Span:
    """A bar of the figure.

    Attributes:
        track: Row, such as ``rollout 0``.
        name: Work: a key of ``SHOWN``.
        step: Batch that the work is for; None for a weight sync.
        begin_s: Start, in seconds from the first event of the trace.
        end_s: End, in seconds from the first event of the trace.
    """

    track: str
    name: str
    step: int | None
    begin_s: float
    end_s: float


def read_spans(path: Path) -> list[Span]:
    """Return the spans of a trace file whose work is in ``SHOWN``.

    Raises:
        SystemExit: The file is not a trace of this project.
    """
    text = path.read_text(encoding="utf-8").rstrip().rstrip(",")
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text + "]")
    rows = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans, opened = [], {}
    for event in events:
        if event["ph"] == "B":
            opened[event["tid"]] = event
        elif event["ph"] == "E":
            begin = opened.pop(event["tid"])
            spans.append(_span(rows[event["tid"]], begin, begin["ts"], event["ts"]))
        elif event["ph"] == "X":
            spans.append(_span(rows[event["tid"]], event, event["ts"], event["ts"] + event["dur"]))
    found = [span for span in spans if span.name in SHOWN]
    if not found:
        raise SystemExit(f"{path} has no span of {', '.join(SHOWN)}; expected the file of trainer.trace_file")
    return found


def _span(row: str, event: dict[str, Any], begin_us: float, end_us: float) -> Span:
    track = row.partition(" (")[0]  # a worker with overlapping spans has several rows
    return Span(track, event["name"].split(" ")[0], event.get("args", {}).get("step"), begin_us / 1e6, end_us / 1e6)


def draw(spans: Sequence[Span], first_step: int, seconds: float, title: str) -> str:
    """Return the SVG of ``seconds`` from the moment when generation of the batch of ``first_step`` begins.

    Raises:
        SystemExit: The trace does not contain this step.
    """
    starts = [span.begin_s for span in spans if span.step == first_step]
    if not starts:
        raise SystemExit(f"the trace has no span of step {first_step}; choose a step that the run reached")
    begin = min(starts)
    end = begin + seconds
    tracks = sorted({span.track for span in spans}, key=_row_order)
    height = TOP_PX + ROW_PX * len(tracks) + 34
    scale = WIDTH_PX / (end - begin)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT_PX + WIDTH_PX + 20} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{LEFT_PX + WIDTH_PX + 20}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT_PX}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for row, track in enumerate(tracks):
        y = TOP_PX + row * ROW_PX
        parts.append(f'<text x="{LEFT_PX - 8}" y="{y + 18}" text-anchor="end">{escape(track)}</text>')
        parts.append(f'<rect x="{LEFT_PX}" y="{y + 3}" width="{WIDTH_PX}" height="{ROW_PX - 6}" fill="#f2f2f2"/>')
        for span in spans:
            if span.track == track and span.end_s > begin and span.begin_s < end:
                parts.append(_bar(span, y, begin, end, scale))
    parts.append(_axis(TOP_PX + ROW_PX * len(tracks), end - begin, scale))
    return "\n".join([*parts, "</svg>\n"])


def _bar(span: Span, y: float, begin: float, end: float, scale: float) -> str:
    x = LEFT_PX + (max(span.begin_s, begin) - begin) * scale
    width = max((min(span.end_s, end) - max(span.begin_s, begin)) * scale, 1.0)
    color = SYNC_COLOR if span.step is None else COLORS[span.step % len(COLORS)]
    what = SHOWN[span.name] if span.step is None else f"{SHOWN[span.name]}, batch {span.step}"
    label = f'<text x="{x + 4:.1f}" y="{y + 19}" fill="#ffffff">{span.step}</text>' if span.step and width > 26 else ""
    return (
        f'<g><title>{escape(what)}: {span.end_s - span.begin_s:.3f} s</title><rect x="{x:.1f}" y="{y + 3}" '
        f'width="{width:.1f}" height="{ROW_PX - 6}" fill="{color}" stroke="#ffffff" stroke-width="0.6"/>{label}</g>'
    )


def _axis(y: float, seconds: float, scale: float) -> str:
    step = next(size for size in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 1e9) if seconds / size <= 12)
    ticks = [
        f'<line x1="{LEFT_PX + n * step * scale:.1f}" y1="{y}" x2="{LEFT_PX + n * step * scale:.1f}" y2="{y + 5}" '
        f'stroke="#666666"/><text x="{LEFT_PX + n * step * scale:.1f}" y="{y + 20}" fill="#666666" '
        f'text-anchor="middle">{n * step:g} s</text>'
        for n in range(int(seconds / step) + 1)
    ]
    return "\n".join(ticks)


def _row_order(track: str) -> tuple[int, str]:
    order = ("rollout", "teacher", "actor")
    pool = track.split(" ")[0]
    return (order.index(pool) if pool in order else len(order), track)


def main() -> None:
    """Read the arguments, draw, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="file of trainer.trace_file")
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--first-step", type=int, required=True, help="step whose batch begins at the left edge")
    parser.add_argument("--seconds", type=float, required=True, help="width of the figure; equal widths are comparable")
    parser.add_argument("--title", default="", help="heading of the figure")
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(draw(read_spans(asked.trace), asked.first_step, asked.seconds, asked.title), encoding="utf-8")


if __name__ == "__main__":
    main()
