"""Results of reward functions: the score, and other numbers that become metrics.

This file imports only the standard library, because the process that calls the functions loads it by its path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any, NamedTuple

METRIC_NAME = re.compile(r"[\w.@-]+(/[\w.@-]+)*")
"""Names of metrics: letters, digits and ``_ - . @``, divided by slashes."""


BEST = "/best@"
"""Part of the name of the metric for the best of several responses."""
Result = tuple[float, dict[str, float]]
"""Score of a response, and other numbers by name."""


class Rejection(NamedTuple):
    """Result of a reward function that is rejected.

    Attributes:
        reason: Reason, as the predicate of a sentence.
        name: Name of the number that cannot be a metric. None if the score is the reason.
    """

    reason: str
    name: object = None


def parse_result(result: object, reserved: Collection[str] = ()) -> Result | Rejection:
    """Return the score and the other numbers of a result, or a rejection.

    As in verl, a result may be a dict with the score and other entries. Of these, finite numbers and booleans are kept;
    the others belong to no metric.

    Args:
        result: Value that the function returned.
        reserved: Names of other metrics, which no number may have.
    """
    entries = result if isinstance(result, dict) and "score" in result else {"score": result}
    score = _to_float(entries["score"])
    if not math.isfinite(score):
        return Rejection(
            f"it returned {result!r:.200} ({type(result).__name__}), expected a finite number, or a dict with one as "
            "'score'"
        )
    numbers: dict[str, float] = {}
    for name, value in entries.items():
        if name == "score" or not isinstance(value, Real) or not math.isfinite(value):
            continue
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            return Rejection(
                f"it returned the number {name!r}, which cannot be the name of a metric; expected letters, digits and "
                "_ - . @, divided by slashes",
                name,
            )
        if name in reserved or BEST in name:
            return Rejection(
                f"it returned the number {name!r}, but reward/{name} or val/SOURCE/{name} is the name of another "
                "metric; rename it",
                name,
            )
        numbers[name] = float(value)
    return score, numbers


def weighted_sum(results: Sequence[Result], labels: Sequence[str], weights: Sequence[float]) -> Result:
    """Return the sum of the weighted scores, each score by its label, and other numbers as ``<label>/<name>``."""
    numbers: dict[str, float] = {}
    for (score, others), label in zip(results, labels, strict=True):
        numbers |= {label: score} | {f"{label}/{name}": value for name, value in others.items()}
    return sum(weight * score for (score, _), weight in zip(results, weights, strict=True)), numbers


def _to_float(value: Any) -> float:
    """Return ``float(value)``, or nan for text and for values that are no number."""
    if isinstance(value, str | bytes | bytearray):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
