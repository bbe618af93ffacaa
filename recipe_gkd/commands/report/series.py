"""Numbers of a curve: reduction to the width of a chart, smoothing, axis ticks and number formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Values of a metric.

    Attributes:
        name: Name of the metric.
        steps: Steps with a value, ascending, [N].
        values: Values at these steps, finite, [N].
    """

    name: str
    steps: Floats
    values: Floats

    @classmethod
    def from_columns(cls, name: str, steps: Sequence[float], values: Sequence[float]) -> Series:
        """Return a series in the order of the steps. Of several values of a step, the last one counts."""
        steps_N, values_N = np.asarray(steps, np.float64), np.asarray(values, np.float64)
        if np.any(np.diff(steps_N) <= 0):
            last = dict(zip(steps_N.tolist(), values_N.tolist(), strict=True))
            steps_N = np.array(sorted(last))
            values_N = np.array([last[step] for step in steps_N.tolist()])
        return cls(name, steps_N, values_N)


@dataclass(frozen=True)
class Points:
    """A series with at most as many points as a chart has room for.

    Attributes:
        steps: Mean step of each point, [N].
        means: Mean value of each point, [N].
        lows: Lowest value of each point, [N].
        highs: Highest value of each point, [N].
        per_point: Largest number of steps in one point.
    """

    steps: Floats
    means: Floats
    lows: Floats
    highs: Floats
    per_point: int


def reduce_points(series: Series, max_points: int) -> Points:
    """Divide a series into equal parts, and return mean and range of each part."""
    n = len(series.steps)
    if n <= max_points:
        return Points(series.steps, series.values, series.values, series.values, 1)
    starts = np.unique(np.linspace(0, n, max_points, endpoint=False).astype(int))
    counts = np.diff([*starts, n])
    return Points(
        np.add.reduceat(series.steps, starts) / counts,
        np.add.reduceat(series.values, starts) / counts,
        np.minimum.reduceat(series.values, starts),
        np.maximum.reduceat(series.values, starts),
        int(counts.max()),
    )


def smooth(values: Floats, window: int) -> Floats:
    """Return the centered moving average over ``window`` values. The ends average the values that exist."""
    if window <= 1 or len(values) < 2:
        return values
    half = min(window, len(values)) // 2
    padded = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return np.asarray((padded[last] - padded[first]) / (last - first), np.float64)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers that span ``low`` to ``high``. The first and last enclose the range."""
    if not high > low:
        margin = abs(low) * 0.5 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten that enclose a positive range, at most six."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    stride = max(1, math.ceil((last - first) / 5))
    last = first + stride * max(1, math.ceil((last - first) / stride))
    return [10.0**power for power in range(first, last + 1, stride)]


def step_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return round step numbers within ``low`` to ``high``."""
    if high <= low:
        return [low]
    return [tick for tick in ticks(low, high, count) if low <= tick <= high and tick == int(tick)]


def number(value: float) -> str:
    """Return a short decimal number with a typographic minus sign: 12.3k, 0.0456, 3e-05."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        text = "0" if value == 0 else str(value)
    elif size >= 1e6:
        text = next(f"{value / unit:.3g}{name}" for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if size >= unit)
    elif size >= 1e4:
        text = f"{value / 1e3:.3g}k"
    elif size >= 1000:
        text = f"{value:.0f}"
    else:
        text = f"{value:.3g}".replace("e-0", "e-")
    return text.replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Return a duration with one or two units: 45 s, 12 min, 3 h 20 min."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"
