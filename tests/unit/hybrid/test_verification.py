from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest

from recipe_gkd.config import load_config
from recipe_gkd.errors import WeightSyncError
from recipe_gkd.hybrid.sync_probe import mismatch_bound
from recipe_gkd.hybrid.verification import MAX_REQUEST_TOKENS, largest_difference, request_ids
from recipe_gkd.weight_sync.model_check import default_bound
from tests._support.base_config import CONFIG_NAME, REQUIRED
from tests._support.described_cluster import described_cluster
from tests._support.errors import raises

EXPECTED = [-1.0, -2.0, -0.5]
BOUND = default_bound({"bfloat16"}, on_cpu=True)
ROLLOUT = "actor_rollout_ref.rollout"


def test_request_is_the_start_of_a_prompt() -> None:
    assert request_ids(range(100)) == list(range(MAX_REQUEST_TOKENS))
    assert request_ids([7]) == [7, 7]


@pytest.mark.parametrize(
    ("dtypes", "noise"), [({"float32"}, 1e-4), ({"bfloat16"}, 0.05), ({"bfloat16", "float32"}, 0.05)]
)
def test_rounding_errors_pass(dtypes: set[str], noise: float) -> None:
    got = {"rollout worker 0": EXPECTED, "rollout worker 1": [value + noise for value in EXPECTED]}
    assert largest_difference(EXPECTED, got, default_bound(dtypes, on_cpu=True)) == pytest.approx(noise)


@pytest.mark.parametrize("wrong", [[-math.log(152_000)] * 3, [math.nan] * 3, [-1.5, -2.5, 0.0]])
def test_other_weights_are_refused_with_the_name_of_the_engine(wrong: list[float]) -> None:
    """An engine that wakes without weights gives every token the same probability."""
    got = {"rollout worker 0": EXPECTED, "rollout worker 1": wrong}
    with raises(WeightSyncError, invalid=("rollout worker 1",)):
        largest_difference(EXPECTED, got, BOUND)


@pytest.mark.parametrize(("override", "bound"), [("auto", 0.004), ("0.5", 0.5), ("null", None)])
def test_bound_is_that_of_the_configuration(override: str, bound: float | None) -> None:
    got = {"rollout worker 0": list(np.add(EXPECTED, 0.7))}
    config = load_config(
        CONFIG_NAME,
        [*REQUIRED, f"{ROLLOUT}.mismatch_bound={override}", "actor_rollout_ref.actor.megatron.dtype=float32"],
    )
    assert mismatch_bound(config, described_cluster("float32")) == bound
    with raises(WeightSyncError, invalid=("rollout worker 0",)) if bound else nullcontext():
        assert largest_difference(EXPECTED, got, bound) == pytest.approx(0.7)
