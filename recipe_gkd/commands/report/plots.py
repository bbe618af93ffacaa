"""Plotly figures of the report as plain dictionaries. Their colors are names of variables in ``page.css``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from recipe_gkd.commands.report.curves import Chart
from recipe_gkd.commands.report.series import Floats, Points, Series, duration, reduce_points, smooth
from recipe_gkd.commands.report.stages import StageTimes, mean_bars
from recipe_gkd.commands.report.trace_spans import TraceWindow

Figure = dict[str, Any]

MAX_POINTS = 320
MIN_POINTS_TO_SMOOTH = 40
LOG_RATIO = 300
"""A chart has a logarithmic axis if the 98th percentile is at least this multiple of the second."""
LARGE = 10_000
"""Smallest value that is written with a unit prefix, such as 12k."""
KINDS = {
    "update": ("update", 1),
    "generate": ("generate", 2),
    "score": ("score (teacher)", 3),
    "sync": ("sync", 4),
    "compute": ("reward", 5),
    "validate": ("validate", 6),
    "save_checkpoint": ("checkpoint", 7),
    "wait": ("wait (trainer)", 8),
}
"""Label and color of the spans by the start of their name."""
OTHER = ("other", 8)


@dataclass(frozen=True)
class LineChart:
    """A chart with the curves that the run has.

    Attributes:
        ends: Label, first and last value of each curve.
    """

    title: str
    explanation: str
    ends: Sequence[tuple[str, float, float]]
    figure: Figure


def line_charts(charts: Iterable[Chart], series: Mapping[str, Series], max_points: int = MAX_POINTS) -> list[LineChart]:
    """Return the charts that have a metric of the run."""
    found = []
    for chart in charts:
        if lines := {label: series[name] for name, label in chart.lines.items() if name in series}:
            ends = [(label, float(one.values[0]), float(one.values[-1])) for label, one in lines.items()]
            found.append(LineChart(chart.title, chart.explanation, ends, _line_figure(chart, lines, max_points)))
    return found


def _line_figure(chart: Chart, lines: Mapping[str, Series], max_points: int) -> Figure:
    points = {label: reduce_points(one, max_points) for label, one in lines.items()}
    first, last = min(one.steps[0] for one in lines.values()), max(one.steps[-1] for one in lines.values())
    margin = float(first == last)
    return {
        "data": [trace for color, (label, one) in enumerate(points.items(), 1) for trace in _line(color, label, one)],
        "layout": {"xaxis": {"range": [first - margin, last + margin]}, "yaxis": _value_axis(chart, points.values())},
    }


def _line(color: int, label: str, points: Points) -> list[Figure]:
    """Return the range, the values and the moving average of a curve."""
    x, ink = _rounded(points.steps), f"--c{color}"
    values: Figure = {"x": x, "y": _rounded(points.means), "name": escape(label), "line": {"color": ink}}
    if len(x) < MIN_POINTS_TO_SMOOTH:
        return [values | {"mode": "lines+markers", "cliponaxis": False}]
    unnamed = {"x": x, "mode": "lines", "hoverinfo": "skip"}
    traces = [
        values | {"mode": "lines", "line": {"color": ink, "width": 1}, "opacity": 0.4},
        unnamed | {"y": _rounded(smooth(points.means, len(x) // 20)), "line": {"color": ink}},
    ]
    if points.per_point > 1:
        around = {"x": x + x[::-1], "y": _rounded(points.lows) + _rounded(points.highs)[::-1], "line": {"width": 0}}
        traces.insert(0, unnamed | around | {"fill": "toself", "fillcolor": ink, "opacity": 0.14})
    return traces


def _value_axis(chart: Chart, points: Iterable[Points]) -> Figure:
    """Return an axis for the values. A few extreme values of a long run are outside of its range."""
    means_N, lows_N, highs_N = np.concatenate([[one.means, one.lows, one.highs] for one in points], axis=1)
    low, high = float(lows_N.min()), float(highs_N.max())
    if chart.can_be_log and low > 0:
        bottom, top = np.percentile(means_N, [2, 98])
        if top >= LOG_RATIO * bottom:
            return {"type": "log"}
    if len(means_N) > MIN_POINTS_TO_SMOOTH:
        bottom, top = np.percentile(lows_N, 0.5), np.percentile(highs_N, 99.5)
        margin = 0.35 * (top - bottom)
        low, high = max(low, float(bottom - margin)), min(high, float(top + margin))
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low) or abs(high) * 0.5 or 1.0
    form = {"exponentformat": "SI", "hoverformat": ".4~s"} if high >= LARGE else {}
    return {"range": [low - margin if low else 0.0, high + margin], **form}


def stage_figure(times: StageTimes) -> Figure:
    """Return the mean seconds per step by stage over the course of the run as stacked bars."""
    steps, means, _ = mean_bars(times)
    totals = np.sum(list(means.values()), axis=0)
    top = float(totals.max())
    if len(totals) > 10:  # a slow first step or a checkpoint must not flatten all other bars
        top = min(top, 2.5 * float(np.percentile(totals, 90)))
    x = _rounded(steps)
    bars: list[Figure] = [
        {
            "type": "bar",
            "x": x,
            "y": [value or None for value in _rounded(values)],
            "name": escape(label),
            "marker": {"color": f"--s{times.colors[label]}"},
        }
        for label, values in means.items()
    ]
    together = {"x": x, "y": _rounded(totals), "name": "together", "mode": "lines", "line": {"width": 0}}
    return {"data": [*bars, together], "layout": {"yaxis": {"range": [0, 1.05 * top], "ticksuffix": " s"}}}


def timeline_figure(timeline: TraceWindow) -> Figure:
    """Return the spans of each worker as horizontal bars. Spans of one kind are one trace."""
    traces: dict[str, Figure] = {}
    labels: dict[float, str] = {}
    y = 0.0
    for name, spans in timeline.rows:
        is_first = escape(name) not in labels.values()
        y += 1.5 if is_first else 1.0
        if is_first:
            labels[y] = escape(name)
        for span in spans:
            label, color = next((KINDS[kind] for kind in KINDS if span.name.startswith(kind)), OTHER)
            trace = traces.setdefault(label, _bars(label, color))
            trace["x"].append(_short(span.end - span.start))
            trace["y"].append(y)
            trace["base"].append(_short(span.start - timeline.start))
            trace["hovertext"].append(f"{escape(span.name.replace('_', ' '))}: {duration(span.end - span.start)}")
    names = {"tickvals": list(labels), "ticktext": list(labels.values()), "automargin": True, "showgrid": False}
    return {
        "data": [traces[label] for label, _ in [*KINDS.values(), OTHER] if label in traces],
        "layout": {
            "barmode": "overlay",
            "hovermode": "closest",
            "xaxis": {"range": [0, timeline.end - timeline.start], "ticksuffix": " s", "showgrid": True},
            "yaxis": {"range": [y + 1, 0.5], "fixedrange": True, **names},
        },
    }


def _bars(label: str, color: int) -> Figure:
    values: Figure = {"x": [], "y": [], "base": [], "hovertext": []}
    shape = {"type": "bar", "orientation": "h", "width": 0.85, "marker": {"color": f"--s{color}"}}
    return values | shape | {"name": label, "hoverinfo": "text"}


def _rounded(values: Floats) -> list[float]:
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float:
    """Return a value with five significant digits."""
    return float(f"{value:.5g}")
