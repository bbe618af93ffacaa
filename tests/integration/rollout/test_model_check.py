"""Faults of an engine that no checksum of a weight sync detects, and the comparison that detects them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from recipe_gkd.cluster import Cluster
from recipe_gkd.errors import ModelMismatch
from recipe_gkd.hybrid.sync_probe import SyncProbe, probe_contexts
from recipe_gkd.weight_sync.model_check import BOUND_FLOAT32_ON_CPU, MismatchGuard
from tests._support.engine_faults import FAULTS, keep_old_output_layer
from tests._support.errors import raises
from tests._support.rollout_models import VOCABULARY, config_for, prompts
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import NEW, OLD, Pool

BOUND = BOUND_FLOAT32_ON_CPU


@contextmanager
def planted(pool: Pool, rank: int, fault: Callable[[Any], Callable[[], None]]) -> Iterator[None]:
    """Plant a fault in a worker during the context."""

    def plant(worker: Any) -> None:
        worker.remove_fault = fault(worker)

    def remove(worker: Any) -> None:
        worker.remove_fault()

    ray.get(pool.handles[rank].__ray_call__.remote(plant), timeout=PATIENCE_S)
    try:
        yield
    finally:
        ray.get(pool.handles[rank].__ray_call__.remote(remove), timeout=PATIENCE_S)


def probe_of(pool: Pool, *ranks: int) -> SyncProbe:
    cluster = cast(Cluster, SimpleNamespace(actors=pool.actor, rollouts=pool.group(*ranks)))
    config = config_for(cast(Any, "unused"))
    contexts = probe_contexts([prompt.ids for prompt in prompts(20)], config)
    assert len(contexts[-1]) == 32 + 48 - 4 and all(ids.max() < VOCABULARY for ids in contexts)
    return SyncProbe(config, cluster, contexts)


def sync(pool: Pool, seed: int, *ranks: int) -> None:
    pool.call_actor("set_weights", seed, True)
    asyncio.run(pool.sync(*ranks).sync(1))


def measure(pool: Pool, *ranks: int) -> dict[str, float]:
    return asyncio.run(probe_of(pool, *ranks).measure(1))


def test_probe_healthy_engines_agree_with_the_actor(pool: Pool) -> None:
    sync(pool, OLD, 0, 1)
    sync(pool, NEW, 0, 1)
    differences = measure(pool, 0, 1)
    assert list(differences) == ["rollout worker 0 of 2", "rollout worker 1 of 2"]
    assert all(0 < difference < BOUND / 100 for difference in differences.values())


def test_probe_long_context_is_sampled_as_often_as_ends_the_run(pool: Pool) -> None:
    sync(pool, OLD, 0)
    probe = probe_of(pool, 0)

    async def uids() -> list[int]:
        [responses] = (await probe.sample(1)).values()
        return sorted(response.uid for response in responses)

    async def body() -> None:
        patience = config_for(cast(Any, "unused")).actor_rollout_ref.rollout.mismatch_patience
        assert [await uids() for _ in range(patience)] == [[0, 1, 2, 3, 4]] * patience
        assert await uids() == [0, 1, 2, 3]
        assert all(0 < difference < BOUND / 100 for difference in (await probe.measure(1)).values())

    asyncio.run(body())


@pytest.mark.parametrize("fault", FAULTS)
def test_probe_planted_fault_is_caught_at_the_first_sync(pool: Pool, fault: str) -> None:
    rank = 1 if FAULTS[fault] is keep_old_output_layer else 0  # the folder of worker 1 stores the tied output layer
    sync(pool, OLD, rank)
    with planted(pool, rank, FAULTS[fault]):
        sync(pool, NEW, rank)
        differences = measure(pool, rank)
    with raises(ModelMismatch, n_steps=1) as caught:
        MismatchGuard(BOUND, 1, {"float32"}).observe(1, differences)
    assert [source.split(" of ")[0] for source in caught.value.sources] == ["rollout worker 0"]


def test_probe_failed_engine_is_left_out(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    sync(pool, OLD, 0)

    def invalidate(worker: Any, reason: str | None) -> None:
        from recipe_gkd.rollout.weight_updates import Invalidity

        worker._updates.invalidity = None if reason is None else Invalidity(reason, "end it")

    ray.get(pool.handles[0].__ray_call__.remote(invalidate, "this test needs it"), timeout=PATIENCE_S)
    try:
        assert measure(pool, 0) == {}
    finally:
        ray.get(pool.handles[0].__ray_call__.remote(invalidate, None), timeout=PATIENCE_S)
    assert "was not compared with the actor" in caplog.text and "this test needs it" in caplog.text
