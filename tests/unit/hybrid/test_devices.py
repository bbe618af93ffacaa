"""State machine of shared devices, with fake workers that know what is on their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest

from recipe_gkd.cluster import Cluster
from recipe_gkd.errors import WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.hybrid.devices import SeparateDevices, SharedDevices, open_devices
from recipe_gkd.hybrid.sync_probe import mismatch_guard
from recipe_gkd.hybrid.turns import DevicePhase
from recipe_gkd.teachers.router import Teachers
from tests._support.base_config import base_config
from tests._support.errors import raises

HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
LEVEL = "actor_rollout_ref.rollout.sleep_level"
TEACHER = ("actor_rollout_ref.teacher.sleep_between_batches=true", "trainer.scheduler=sync")


class FakeDevices:
    """Actor, engine and teacher on one device, in place of :class:`Workers` and :class:`Teachers`.

    Attributes:
        events: Calls in their order.
        on_device: Models in the memory of the device.
        weights: Version of the engine's weights, None if it has none.
    """

    engine_dtype = "float32"
    actor_devices = ("cpu",)

    def __init__(self, sleep_level: int = 2) -> None:
        self.actors, self.rollouts, self.weights_of_engine = self, self, None
        self.weights = self
        self.sleep_level = sleep_level
        self.events: list[str] = []
        self.on_device = set() if sleep_level else {"engine weights", "engine cache"}
        self.wrong_log_probs = False
        self.dies_in: list[str] = []
        self.fails_in: list[str] = []

    def label(self, rank: int) -> str:
        return f"rollout worker {rank} of 1"

    async def call(self, method: Any, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        method = method.__name__
        if method in ("peak_memory", "reset_peak_memory"):
            return [1 << 30]
        if method in self.fails_in:
            self.fails_in.remove(method)
            raise WorkerError("no memory", phase=phase)
        if method in ("prepare_update", "release_states"):
            (self.on_device.add if method == "prepare_update" else self.on_device.discard)("actor")
            return [None]
        self.events.append(" ".join([method, *(arg for arg in args if isinstance(arg, str))]))
        if method in self.dies_in:
            self.dies_in.remove(method)
            raise WorkerDied(f"{phase}: rollout worker 0 of 1 died")
        return [await getattr(self, f"_{method}")(*args)]

    async def _sleep(self) -> None:
        self.on_device -= {"engine weights", "engine cache"}
        if self.sleep_level == 2:
            self.weights_of_engine = None

    async def _wake(self, part: str) -> None:
        assert "teacher" not in self.on_device
        self.on_device.add({"weights": "engine weights", "kv_cache": "engine cache"}[part])

    async def _log_probs(self, request: list[Any]) -> list[Any]:
        if "engine cache" in self.on_device:
            return [-1.0 - (self.weights_of_engine or 0) - 5.0 * self.wrong_log_probs] * (len(request) - 1)
        return [[-1.0 - self.version] * len(continuation) for _, continuation in request]

    version = 0

    async def sync(self, version: int | None = None) -> dict[str, float]:
        self.events.append(f"send {version}")
        assert self.on_device == ({"engine weights"} if self.sleep_level else {"engine weights", "engine cache"})
        self.weights_of_engine = self.version = version or 0
        return {"weights/version": float(version or 0)}

    async def replace_dead_rollouts(self, death: WorkerDied) -> None:
        self.events.append("replace")
        self.weights_of_engine = None
        self.on_device |= {"engine weights", "engine cache"}

    async def sleep(self) -> None:
        self.events.append("teacher sleeps")
        self.on_device.discard("teacher")

    async def wake(self) -> None:
        self.events.append("teacher wakes")
        self.on_device.add("teacher")


def devices_of(fake: FakeDevices, *overrides: str) -> SharedDevices:
    config = base_config(*overrides, f"{LEVEL}={fake.sleep_level}", "actor_rollout_ref.actor.megatron.dtype=float32")
    guard = mismatch_guard(config, fake)
    devices = open_devices(config, cast(Cluster, fake), cast(Teachers, fake), [np.array([1, 2, 3])], guard)
    assert isinstance(devices, SharedDevices)
    return devices


async def visit(devices: SharedDevices, fake: FakeDevices, *phases: DevicePhase) -> list[set[str]]:
    """Run phases one after the other and return what is on the device in each. A sync sends the next version."""
    seen = []
    for phase in phases:
        if phase == "sync":
            await devices.sync(fake.version + 1)
            seen.append(set(fake.on_device))
            continue
        async with devices.turn(phase):
            seen.append(set(fake.on_device))
            if phase == "generate":
                assert fake.weights_of_engine == fake.version
    return seen


def run(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), 10))


BOTH = {"engine weights", "engine cache"}


@pytest.mark.parametrize("level", [1, 2])
def test_device_has_only_what_the_phase_needs(level: int) -> None:
    fake = FakeDevices(level)
    devices = devices_of(fake, *HYBRID)
    seen = run(lambda: visit(devices, fake, *["sync", "generate", "score", "update"] * 2))
    assert seen == [{"engine weights"}, BOTH, BOTH, {"actor"}] * 2  # the teacher has its own device
    cycle = ["wake weights", "send", "log_probs", "wake kv_cache", "log_probs", "sleep"]
    assert [event.rstrip(" 12") for event in fake.events] == [*cycle, *cycle]


def test_metrics_name_memory_of_each_phase_and_times_once() -> None:
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)
    run(lambda: visit(devices, fake, "sync", "generate", "update"))
    metrics = run(devices.take_metrics)
    assert {name for name in metrics if name.startswith("perf/")} == {
        f"perf/memory_gb/{phase}" for phase in ("sync", "generate", "update")
    }
    assert metrics["perf/memory_gb/update"] == 2.0  # actor and engine on a CPU
    assert {"timing/engine_sleep", "timing/engine_wake"} <= metrics.keys()
    assert metrics["weights/wake_log_prob_diff"] == 0
    assert run(devices.take_metrics).keys() == {"perf/memory_gb/update"}


def test_closed_devices_prepare_nothing() -> None:
    """A preparation that goes on while the workers end would replace them."""
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)

    async def scenario() -> None:
        await visit(devices, fake, "sync", "generate")
        fake.dies_in = ["sleep"]
        devices.prepare_update()
        await devices.close()

    run(scenario)
    assert "replace" not in fake.events


def test_level_0_moves_nothing() -> None:
    fake = FakeDevices(0)
    devices = devices_of(fake, *HYBRID)
    assert run(lambda: visit(devices, fake, "sync", "generate", "update", "sync")) == [
        BOTH,
        BOTH,
        BOTH | {"actor"},
        BOTH,
    ]
    assert fake.events == ["send 1", "send 2"]


def test_generation_without_an_update_before_gets_the_same_weights_again() -> None:
    """A checkpoint between a validation and the next batch makes the engine sleep."""
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)
    run(lambda: visit(devices, fake, "sync", "generate", "update", "generate"))
    assert [event for event in fake.events if "send" in event] == ["send 1", "send 1"]


def test_engine_that_woke_with_other_weights_generates_nothing() -> None:
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)
    fake.wrong_log_probs = True
    with raises(WeightSyncError, invalid=("rollout worker 0 of 1",)):
        run(lambda: visit(devices, fake, "sync", "generate"))


@pytest.mark.parametrize("method", ["sleep", "wake", "log_probs"])
def test_worker_that_dies_in_a_transition_is_replaced_and_gets_weights(method: str) -> None:
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)

    async def scenario() -> list[set[str]]:
        await visit(devices, fake, "sync", "generate", "update")
        if method == "log_probs":
            await visit(devices, fake, "sync")  # the actor's own call of this method
        fake.dies_in = [method]
        return await visit(devices, fake, *(["generate"] if method == "log_probs" else ["sync", "generate", "update"]))

    assert run(scenario)[-1] == (BOTH if method == "log_probs" else {"actor"})
    assert fake.events.count("replace") == 1


def test_update_is_prepared_while_the_teacher_scores() -> None:
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)

    async def scenario() -> None:
        await visit(devices, fake, "sync")
        async with devices.turn("generate"):
            devices.prepare_update()  # of the first of two replicas
            await asyncio.sleep(0.01)
            assert fake.on_device == BOTH
        devices.prepare_update()
        await asyncio.sleep(0.01)
        assert fake.on_device == {"actor"}
        # A replica died after all: its prompts are generated again, and nothing of the actor may stay.
        await visit(devices, fake, "generate")
        assert fake.on_device == BOTH

    run(scenario)


def test_failed_preparation_is_repeated_by_the_update() -> None:
    fake = FakeDevices()
    devices = devices_of(fake, *HYBRID)

    async def scenario() -> None:
        await visit(devices, fake, "sync", "generate")
        fake.fails_in = ["prepare_update", "prepare_update"]
        devices.prepare_update()
        await asyncio.sleep(0.01)
        with raises(WorkerError, phase="return of the actor's states"):
            await visit(devices, fake, "update")
        assert await visit(devices, fake, "update") == [{"actor"}]

    run(scenario)


class TestTeacher:
    @pytest.mark.parametrize("is_hybrid", [True, False])
    def test_teacher_is_awake_only_while_it_scores(self, is_hybrid: bool) -> None:
        fake = FakeDevices(2 if is_hybrid else 0)
        devices = devices_of(fake, *(HYBRID if is_hybrid else ()), *TEACHER)
        seen = run(lambda: visit(devices, fake, *["sync", "generate", "score", "update"] * 2))
        assert ["teacher" in models for models in seen] == [False, False, True, False] * 2
        if is_hybrid:
            assert seen[2] == {"teacher"}

    def test_groups_of_a_batch_share_one_wake_up(self) -> None:
        fake = FakeDevices()
        devices = devices_of(fake, *HYBRID, *TEACHER)

        async def score() -> None:
            async with devices.turn("score"):
                await asyncio.sleep(0.01)

        async def scenario() -> None:
            await visit(devices, fake, "sync")
            async with devices.turn("generate"):
                scores = [asyncio.create_task(score()) for _ in range(4)]
                await asyncio.sleep(0.01)
                assert "teacher" not in fake.on_device
            await asyncio.gather(*scores)

        run(scenario)
        assert fake.events.count("teacher wakes") == 1


def test_separate_devices_have_no_transitions() -> None:
    fake = FakeDevices(0)
    config = base_config("trainer.scheduler=sync")
    guard = mismatch_guard(config, fake)
    devices = open_devices(config, cast(Cluster, fake), cast(Teachers, fake), [np.array([1, 2])], guard)
    assert isinstance(devices, SeparateDevices)

    async def scenario() -> None:
        async with devices.turn("generate"), devices.turn("update"):
            assert await devices.sync(4) == {"weights/version": 4.0}

    run(scenario)
    assert fake.events == ["send 4"] and not run(devices.take_metrics)
