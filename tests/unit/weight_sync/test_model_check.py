"""Bound on the difference between the model that generates and the actor."""

from __future__ import annotations

import logging
import math

import pytest

from recipe_gkd.errors import ModelMismatch, WeightSyncError
from recipe_gkd.hybrid.sync_probe import mismatch_guard
from recipe_gkd.weight_sync.model_check import MismatchGuard, default_bound
from tests._support.base_config import base_config
from tests._support.described_cluster import described_cluster
from tests._support.errors import raises

BOUND = "actor_rollout_ref.rollout.mismatch_bound"
FLOAT32 = "actor_rollout_ref.actor.megatron.dtype=float32"


def guard(patience: int = 3) -> MismatchGuard:
    return MismatchGuard(0.01, patience, {"float32"})


class TestBound:
    def test_bound_depends_on_both_data_types(self) -> None:
        on_cpu, on_gpu = (default_bound({"float32"}, on_cpu=on_cpu) for on_cpu in (True, False))
        assert on_cpu < on_gpu < default_bound({"bfloat16"}, on_cpu=False)
        assert default_bound({"bfloat16"}, on_cpu=True) == default_bound({"float32", "bfloat16"}, on_cpu=True)

    @pytest.mark.parametrize(("value", "allowed"), [("auto", 0.0039), ("0.5", 0.49), ("null", math.inf)])
    def test_key_sets_bound(self, value: str, allowed: float) -> None:
        found = mismatch_guard(base_config(f"{BOUND}={value}", FLOAT32), described_cluster("float32"))
        assert found.is_enabled == (value != "null")
        found.observe(0, {"a": allowed})
        if value != "null":
            with pytest.raises(WeightSyncError):
                for step in range(3):
                    found.observe(step, {"a": allowed + 0.02})


class TestGuard:
    def test_first_step_warns_and_last_of_patience_raises(self, caplog: pytest.LogCaptureFixture) -> None:
        watched = guard()
        with caplog.at_level(logging.WARNING):
            watched.observe(6, {"rollout worker 0": 1e-6, "rollout worker 1": 0.3})
        assert "step 7: the rollout engine computes another model" in caplog.text
        assert "rollout worker 1 0.3 nats" in caplog.text and "rollout worker 0" not in caplog.text
        assert "doctor" in caplog.text and "float32" in caplog.text
        watched.observe(7, {"the batch": 0.3})
        with raises(ModelMismatch, phase="step 9", sources=("the batch",), n_steps=3):
            watched.observe(8, {"the batch": math.nan})

    def test_step_within_bound_restarts_the_count(self) -> None:
        watched = guard(2)
        for step in (0, 2, 4, 6):
            watched.observe(step, {"the batch": 1.0})
            watched.observe(step + 1, {"the batch": 0.0})

    @pytest.mark.parametrize("between", [None, {}])
    def test_steps_without_comparison_do_not_restart_the_count(self, between: dict[str, float] | None) -> None:
        """With a staleness bound of 2 or more a sync can skip versions, and a probe can find no engine that answers."""
        watched = guard(3)
        for step in (0, 1):
            watched.observe(2 * step, {"rollout worker 0": 1.0})
            if between is not None:
                watched.observe(2 * step + 1, between)
        with raises(ModelMismatch, n_steps=3):
            watched.observe(5, {"rollout worker 0": 1.0})

    def test_two_measures_of_one_step_count_once(self) -> None:
        watched = guard(2)
        watched.observe(3, {"rollout worker 0": 1.0})
        watched.observe_update(3, {"actor/rollout_log_prob_diff": 1.0})
        with pytest.raises(WeightSyncError):
            watched.observe_update(4, {"actor/rollout_log_prob_diff": 1.0})

    def test_update_without_tokens_of_present_weights_is_not_compared(self) -> None:
        guard(1).observe_update(3, {"actor/rollout_kl": 5.0})
