"""Weights of response tokens from a column: numbers, lists, missing values, and values that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipe_gkd.data.weights import KEY, expanded, read_weights
from recipe_gkd.errors import DataError
from tests._support.data_sets import data_set_of
from tests._support.errors import raises


def weights_of(values: list[Any], column: str = "weight", rows: list[int] | None = None) -> list[np.ndarray | None]:
    data_set = data_set_of({"prompt": ["x"] * len(values), "weight": values})
    return read_weights(data_set, list(range(len(values))) if rows is None else rows, column)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [1, 1, 1, 1]),
        (0.5, [0.5] * 4),
        (0, [0] * 4),
        ([2.0], [2] * 4),
        ([2.0, 0.0, 1.0], [2, 0, 1, 1]),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1, 2, 3, 4]),
    ],
)
def test_value_gives_the_weights_of_a_response(value: Any, expected: list[float]) -> None:
    weights, _ = weights_of([value, None])
    found_T = expanded(weights, 4)
    assert found_T.dtype == np.float32 and found_T.tolist() == expected
    assert expanded(weights, 0).shape == (0,)


def test_weights_are_those_of_the_rows_of_the_prompts_and_may_be_nested() -> None:
    found = weights_of([{"of": 1.0}, {"of": 2.0}, {"of": None}, {"of": 4.0}], "weight.of", rows=[3, 1, 2])
    assert [None if weights is None else weights.tolist() for weights in found] == [[4.0], [2.0], None]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), [], [1.0, -0.5], [None], ["1"], "high"], ids=str)
def test_invalid_weight_is_refused_with_row_and_column(value: Any) -> None:
    with raises(DataError, row=1, column="weight"):
        weights_of([None, value, None])


@pytest.mark.parametrize(
    ("values", "is_refused"), [([0, 0.0], True), ([[0.0], [0.0, 0.0]], True), ([0.0, None], False)]
)
def test_weights_that_are_all_zero_are_refused(values: list[Any], is_refused: bool) -> None:
    if is_refused:
        with raises(DataError, column="weight"):
            weights_of(values)
    else:
        weights_of(values)


def test_weight_that_float32_cannot_represent_is_refused() -> None:
    with raises(DataError, row=0):
        weights_of([1e39])


def test_missing_column_names_the_existing_ones() -> None:
    with raises(DataError, existing=("prompt", "weight")) as caught:
        weights_of([1.0], "wait")
    assert KEY in str(caught.value)
