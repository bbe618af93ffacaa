"""Tests of the sleep of an engine that fails, or that wakes with other constants."""

from __future__ import annotations

from typing import Any

import pytest

from recipe_gkd.errors import WeightSyncError, WorkerDied
from recipe_gkd.rollout.engine_sleep import EngineSleep
from recipe_gkd.rollout.weight_updates import WeightUpdates
from recipe_gkd.runtime.out_of_memory import ADVICE
from tests._support.errors import raises


class FakeEngine:
    """vLLM's engine with two ranks. ``fail`` names a call that raises; ``constants`` are the checksums of the ranks."""

    def __init__(self) -> None:
        self.fail, self.constants = "", [1, 2]
        self.calls: list[Any] = []

    def get_num_unfinished_requests(self) -> int:
        return 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.note(method)
        checksums = [{"parameters": {}, "constants": {"cos": value}} for value in self.constants]
        if method == "gkd_prepare_sleep":
            return [{"bytes_in_use": 10, "checksums": each} for each in checksums]
        return checksums if method == "gkd_checksums" else [4, 4]

    def sleep(self, level: int) -> None:
        self.note("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.note(f"wake {tags[0]}")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True

    def set_weight_version(self, version: str) -> None:
        pass

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:119")


@pytest.fixture
def parts() -> tuple[Any, EngineSleep, WeightUpdates]:
    updates = WeightUpdates("rollout worker 3")
    engine: Any = FakeEngine()
    updates.set_version(engine, 0)
    return engine, EngineSleep("rollout worker 3", updates), updates


@pytest.mark.parametrize("fail", ["sleep", "wake weights", "gkd_reset_cache"])
def test_failed_call_ends_the_engine_and_names_keys(parts: Any, fail: str) -> None:
    engine, state, _ = parts
    engine.fail = fail
    phases = {"sleep": "sleep", "wake weights": "wake-up of the weights", "gkd_reset_cache": "wake-up of the KV cache"}
    keys = ADVICE["rollout", "wake-up"].keys
    with raises(WorkerDied, worker="rollout worker 3", phase=phases[fail], keys=keys):
        state.sleep(engine, 2)
        state.wake(engine, "weights")
        state.wake(engine, "kv_cache")


def test_changed_constant_of_one_rank_makes_the_engine_invalid_permanently(parts: Any) -> None:
    engine, state, updates = parts
    state.sleep(engine, 2)
    engine.constants = [1, 3]
    changed = {"tensors": ("cos",), "worker": "rollout worker 3", "invalid": ("rollout worker 3",)}
    with raises(WeightSyncError, **changed):
        state.wake(engine, "weights")
    state.wake(engine, "kv_cache")
    updates.set_version(engine, 1)  # as a sync does
    with raises(WeightSyncError, **changed):
        updates.ensure_valid()


def test_each_call_has_an_effect_once(parts: Any) -> None:
    engine, state, _ = parts
    assert state.sleep(engine, 1).released_bytes == 12
    for part in ("weights", "weights", "kv_cache", "kv_cache", "weights"):
        state.sleep(engine, 0)
        state.wake(engine, part)
    state.ensure_awake()
    assert [call for call in engine.calls if "gkd" not in call] == ["sleep", "wake weights", "wake kv_cache"]
    assert state.sleep(engine, 0).released_bytes == 0
