from __future__ import annotations

import math

import numpy as np
import pytest

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.hybrid.verification import MAX_REQUEST_TOKENS, largest_difference, request_ids

EXPECTED = [-1.0, -2.0, -0.5]


def test_request_is_the_start_of_a_prompt() -> None:
    assert request_ids(range(100)) == list(range(MAX_REQUEST_TOKENS))
    assert request_ids([7]) == [7, 7]


@pytest.mark.parametrize(
    ("dtypes", "noise"), [({"float32"}, 1e-4), ({"bfloat16"}, 0.05), ({"bfloat16", "float32"}, 0.05)]
)
def test_rounding_errors_pass(dtypes: set[str], noise: float) -> None:
    got = {"rollout worker 0": EXPECTED, "rollout worker 1": [value + noise for value in EXPECTED]}
    assert largest_difference(EXPECTED, got, dtypes) == pytest.approx(noise)


@pytest.mark.parametrize("wrong", [[-math.log(152_000)] * 3, [math.nan] * 3, [-1.5, -2.5, 0.0]])
def test_other_weights_are_refused_with_the_name_of_the_engine(wrong: list[float]) -> None:
    """An engine that wakes without weights gives every token the same probability."""
    got = {"rollout worker 0": EXPECTED, "rollout worker 1": wrong}
    with pytest.raises(
        WeightSyncError, match=r"wrong weights: .* of 4 fixed tokens .* by rollout worker 1: "
    ) as caught:
        largest_difference(EXPECTED, got, {"bfloat16"})
    assert "worker 0" not in str(caught.value)


def test_limit_of_float32_is_stricter() -> None:
    got = {"rollout worker 0": list(np.add(EXPECTED, 0.1))}
    assert largest_difference(EXPECTED, got, {"bfloat16"})
    with pytest.raises(WeightSyncError, match=r"expected at most 0\.004"):
        largest_difference(EXPECTED, got, {"float32"})
