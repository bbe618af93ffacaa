"""Results of reward functions: scores, other numbers, and weighted sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from recipe_gkd.rewards.reporting import mean_numbers
from recipe_gkd.rewards.results import Rejection, Result, parse_result, weighted_sum


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, (1.0, {})),
        (np.float32(0.5), (0.5, {})),
        ({"score": 0.5, "acc": True, "format/tags": np.int64(2)}, (0.5, {"acc": 1.0, "format/tags": 2.0})),
        ({"score": True, "pred": "12", "steps": [1], "missing": None, "ratio": math.nan}, (1.0, {})),
    ],
)
def test_score_and_numbers_of_a_result(result: Any, expected: Any) -> None:
    assert parse_result(result) == (*expected, ())


@pytest.mark.parametrize(
    ("result", "name"),
    [
        ({"acc": 1}, None),
        (math.inf, None),
        ({"score": 1, "two words": 2}, "two words"),
        ({"score": 1, 3: 2}, 3),
        ({"score": 1, "mean": 2}, "mean"),
        ({"score": 1, "f/best@4": 2}, "f/best@4"),
    ],
)
def test_unusable_result_is_rejected_with_the_name(result: Any, name: object) -> None:
    rejection = parse_result(result, reserved={"mean"})
    assert isinstance(rejection, Rejection) and rejection.name == name


def test_scores_of_turns() -> None:
    result = {"turn_scores": np.array([0.5, -1, 2]), "acc": 1}
    assert parse_result(result, n_turns=3) == (1.5, {"acc": 1.0}, (0.5, -1.0, 2.0))


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"turn_scores": [1.0]}, "expected 2 finite numbers"),
        ({"turn_scores": [1.0, math.nan]}, "expected 2 finite numbers"),
        ({"turn_scores": 1.0}, "expected 2 finite numbers"),
        ({"turn_scores": "ab"}, "expected 2 finite numbers"),
        ({"turn_scores": [1.0, 1.0], "score": 2.0}, "both"),
    ],
)
def test_unusable_scores_of_turns_are_rejected(result: Any, reason: str) -> None:
    rejection = parse_result(result, n_turns=2)
    assert isinstance(rejection, Rejection) and reason in rejection.reason


def test_weighted_sum_names_each_function() -> None:
    results = [Result(1.0, {"acc": 1.0}), Result(0.5, {})]
    assert weighted_sum(results, ["math", "format"], [1.0, -0.2]) == (
        pytest.approx(0.9),
        {"math": 1.0, "math/acc": 1.0, "format": 0.5},
        (),
    )


def test_score_beside_scores_of_turns_belongs_to_the_last_turn() -> None:
    results = [Result(3.0, {}, (1.0, 2.0)), Result(0.5, {})]
    assert weighted_sum(results, ["a", "b"], [2.0, -1.0]) == (5.5, {"a": 3.0, "b": 0.5}, (2.0, 3.5))


def test_mean_of_a_number_is_over_the_responses_that_have_it() -> None:
    assert mean_numbers([{"a": 1.0, "b": 2.0}, {"a": 0.0}, {}], "reward/") == {"reward/a": 0.5, "reward/b": 2.0}
