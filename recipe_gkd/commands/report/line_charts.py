"""Line charts of metrics: inline SVG for the lines, HTML for the labels, so that text keeps its size on any screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from recipe_gkd.commands.report.markup import VIEW, band_path, data_script, dots_path, line_path, rounded, text
from recipe_gkd.commands.report.series import (
    Floats,
    Points,
    Series,
    log_ticks,
    number,
    reduce_points,
    smooth,
    step_ticks,
    ticks,
)

MAX_POINTS = 320
MIN_POINTS_TO_SMOOTH = 40
MAX_POINTS_WITH_DOTS = 60
LOG_RATIO = 300
"""A chart has a logarithmic axis if the 98th percentile is at least this multiple of the second."""


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis.

    Attributes:
        title: Title of the chart.
        explanation: One sentence about its content.
        lines: Label of each curve by the name of its metric. Metrics that the run lacks are left out.
        can_be_log: Choose a logarithmic axis for positive values that differ by orders of magnitude.
        from_zero: Include 0 in the axis.
    """

    title: str
    explanation: str
    lines: Mapping[str, str] = field(default_factory=dict)
    can_be_log: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class _Axis:
    """Range of an axis, from the first to the last tick."""

    ticks: Sequence[float]
    is_log: bool = False

    def place(self, values: Floats) -> Floats:
        """Return positions between 0 and 1."""
        if self.is_log:
            first, last = np.log10(self.ticks[0]), np.log10(self.ticks[-1])
            values = np.log10(np.maximum(values, self.ticks[0]))
        else:
            first, last = self.ticks[0], self.ticks[-1]
        return np.asarray((values - first) / (last - first), np.float64)


def line_chart(chart: Chart, series: Mapping[str, Series], *, is_small: bool = False) -> str:
    """Return a chart as HTML. Empty if the run has none of its metrics.

    Args:
        chart: Curves to draw.
        series: All metrics of the run.
        is_small: Draw fewer points, without the range of the values.
    """
    found = {label: series[name] for name, label in chart.lines.items() if name in series}
    if not found:
        return ""
    max_points = MAX_POINTS // 2 if is_small else MAX_POINTS
    points = {label: reduce_points(one, max_points) for label, one in found.items()}
    steps = np.concatenate([one.steps for one in found.values()])
    first, last = float(steps.min()), float(steps.max())
    value_axis = _value_axis(chart, list(points.values()))
    step_axis = _Axis([first, last] if last > first else [first - 1, last + 1])
    lines = [
        _line(number_, one, step_axis, value_axis, has_dots=len(one.steps) <= MAX_POINTS_WITH_DOTS)
        for number_, one in enumerate(points.values(), start=1)
    ]
    legend = "".join(_legend(index, label, one) for index, (label, one) in enumerate(found.items(), start=1))
    data = [
        {"label": label, "color": index, "x": rounded(one.steps), "y": rounded(one.means)}
        for index, (label, one) in enumerate(points.items(), start=1)
    ]
    summary = "; ".join(
        f"{label} from {number(one.values[0])} to {number(one.values[-1])}" for label, one in found.items()
    )
    explanation = f"<p>{text(chart.explanation)}</p>" if chart.explanation else ""
    size = " small" if is_small else ""
    return (
        f'<figure class="card chart{size}"><figcaption><h3>{text(chart.title)}</h3>{explanation}'
        f'<ul class="legend">{legend}</ul></figcaption>'
        + plot(lines, value_axis.ticks, step_ticks(first, last), step_axis.place, value_axis.place, summary)
        + data_script({"x0": step_axis.ticks[0], "x1": step_axis.ticks[-1], "unit": "step", "lines": data})
        + "</figure>"
    )


def plot(
    shapes: Sequence[str],
    y_ticks: Sequence[float],
    x_ticks: Sequence[float],
    place_x: Callable[[Floats], Floats],
    place_y: Callable[[Floats], Floats],
    summary: str,
) -> str:
    """Return the frame of a plot with axis labels and grid lines around SVG shapes.

    Args:
        shapes: SVG elements in units of :data:`~recipe_gkd.commands.report.markup.VIEW`.
        y_ticks: Values with a grid line.
        x_ticks: Steps with a label.
        place_x: Function from steps to positions between 0 and 1.
        place_y: Function from values to positions between 0 and 1.
        summary: Text for screen readers.
    """
    x = place_x(np.asarray(x_ticks, np.float64)).tolist()
    y = place_y(np.asarray(y_ticks, np.float64)).tolist()
    grid = "".join(f'<path class="grid" d="M0 {VIEW * (1 - at):.1f}H{VIEW}"/>' for at in y)
    y_labels = "".join(
        f'<span style="top:{100 * (1 - at):.2f}%">{number(v)}</span>' for at, v in zip(y, y_ticks, strict=True)
    )
    x_labels = "".join(
        f'<span style="left:{100 * at:.2f}%">{number(v)}</span>' for at, v in zip(x, x_ticks, strict=True)
    )
    return (
        f'<div class="plot"><div class="y" aria-hidden="true">{y_labels}</div>'
        f'<div class="area" tabindex="0"><svg viewBox="0 0 {VIEW} {VIEW}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(summary)}">{grid}{"".join(shapes)}</svg></div>'
        f'<div class="x" aria-hidden="true">{x_labels}</div></div>'
    )


def _value_axis(chart: Chart, points: Sequence[Points]) -> _Axis:
    """Return an axis for the values. A few extreme values of a long run may be cut off."""
    values = np.concatenate([one.means for one in points])
    lows, highs = np.concatenate([one.lows for one in points]), np.concatenate([one.highs for one in points])
    low, high = float(lows.min()), float(highs.max())
    if chart.can_be_log and low > 0:
        bottom, top = np.percentile(values, [2, 98])
        if top >= LOG_RATIO * bottom:
            return _Axis(log_ticks(float(np.percentile(lows, 1)), high), is_log=True)
    if len(values) > MIN_POINTS_TO_SMOOTH:
        bottom, top = np.percentile(lows, 0.5), np.percentile(highs, 99.5)
        margin = 0.35 * (top - bottom)
        low, high = max(low, float(bottom - margin)), min(high, float(top + margin))
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    return _Axis(ticks(low, high))


def _line(index: int, points: Points, step_axis: _Axis, value_axis: _Axis, *, has_dots: bool) -> str:
    """Return the range, the values and the moving average of a curve."""

    def y(values: Floats) -> Floats:
        return VIEW * (1 - np.clip(value_axis.place(values), -0.01, 1.01))

    x, style = VIEW * step_axis.place(points.steps), f'style="--c:var(--c{index})"'
    shapes = []
    if points.per_point > 1:
        shapes.append(f'<path class="band" {style} d="{band_path(x, y(points.lows), y(points.highs))}"/>')
    if len(x) >= MIN_POINTS_TO_SMOOTH:
        shapes.append(f'<path class="raw" {style} d="{line_path(x, y(points.means))}"/>')
        shapes.append(f'<path class="line" {style} d="{line_path(x, y(smooth(points.means, len(x) // 20)))}"/>')
    else:
        shapes.append(f'<path class="line" {style} d="{line_path(x, y(points.means))}"/>')
    if has_dots and len(x) < MIN_POINTS_TO_SMOOTH:
        shapes.append(f'<path class="dots" {style} d="{dots_path(x, y(points.means))}"/>')
    return "".join(shapes)


def _legend(index: int, label: str, series: Series) -> str:
    return f'<li><i style="--c:var(--c{index})"></i>{text(label)} <b>{number(float(series.values[-1]))}</b></li>'
