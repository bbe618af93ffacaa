"""Results of reward functions: the score, scores of turns, and other numbers that become metrics.

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
TURNS = "turn_scores"


class Result(NamedTuple):
    """Result of a reward function.

    Attributes:
        score: Score of the response.
        numbers: Other numbers by name.
        turn_scores: Score of each turn, of which ``score`` is the sum. Empty if the turns have none.
    """

    score: float
    numbers: dict[str, float]
    turn_scores: tuple[float, ...] = ()


class Rejection(NamedTuple):
    """Result of a reward function that is rejected.

    Attributes:
        reason: Reason, as the predicate of a sentence.
        name: Name of the number that cannot be a metric. None if the score is the reason.
    """

    reason: str
    name: object = None


def parse_result(result: object, reserved: Collection[str] = (), n_turns: int = 1) -> Result | Rejection:
    """Return the score and the other numbers of a result, or a rejection.

    As in verl, a result may be a dict with the score and other entries. Of these, finite numbers and booleans are kept;
    the others belong to no metric. In place of the score it may have ``turn_scores``, a score for each turn.

    Args:
        result: Value that the function returned.
        reserved: Names of other metrics, which no number may have.
        n_turns: Number of turns of the response.
    """
    entries: dict[Any, Any] = {"score": result}
    if isinstance(result, dict) and not result.keys().isdisjoint(("score", TURNS)):
        entries = dict(result)
    turn_scores: tuple[float, ...] = ()
    if TURNS in entries:
        found = _turn_scores(entries, n_turns)
        if isinstance(found, Rejection):
            return found
        turn_scores, entries["score"] = found, sum(found)
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
    return Result(score, numbers, turn_scores)


def _turn_scores(entries: dict[Any, Any], n_turns: int) -> tuple[float, ...] | Rejection:
    given = entries[TURNS]
    if "score" in entries:
        return Rejection(
            f"it returned both 'score' and {TURNS!r}, whose sum is the score; add a score of the whole conversation to "
            "that of its last turn"
        )
    try:
        found = tuple(_to_float(value) for value in given)
    except TypeError:
        found = (math.nan,)
    if len(found) != n_turns or not all(map(math.isfinite, found)):
        return Rejection(f"it returned {TURNS!r} {given!r:.200}, expected {n_turns} finite numbers, one for each turn")
    return found


def weighted_sum(results: Sequence[Result], labels: Sequence[str], weights: Sequence[float]) -> Result:
    """Return the sum of the weighted scores, each score by its label, and other numbers as ``<label>/<name>``.

    If a function has scored the turns, the score of one that has not belongs to the last turn.
    """
    numbers: dict[str, float] = {}
    for one, label in zip(results, labels, strict=True):
        numbers |= {label: one.score} | {f"{label}/{name}": value for name, value in one.numbers.items()}
    n_turns = max(len(one.turn_scores) for one in results)
    of_turns = [one.turn_scores or (*[0.0] * (n_turns - 1), one.score) for one in results]
    turn_scores = (_weighted(scores, weights) for scores in zip(*of_turns, strict=True))
    return Result(_weighted([one.score for one in results], weights), numbers, tuple(turn_scores) if n_turns else ())


def _weighted(scores: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * score for score, weight in zip(scores, weights, strict=True))


def _to_float(value: Any) -> float:
    """Return ``float(value)``, or nan for text and for values that are no number."""
    if isinstance(value, str | bytes | bytearray):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
