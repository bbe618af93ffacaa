"""Tests of weight syncs to real engines in Ray actors: generation after a sync, and after every kind of failure."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from recipe_gkd.data.samples import Response
from recipe_gkd.errors import DeadlineError, WeightSyncError
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.errors import culprits, raises
from tests._support.rollout_models import DoomedWorker, config_for, make_model, prompts, reference_logprobs
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import NEW, OLD, TRANSPORT_TIMEOUT_S, Pool, environment, make_synchronizer


def same(found: dict[int, Response], expected: dict[int, Response]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[uid].ids, expected[uid].ids)
        and np.allclose(found[uid].logprobs, expected[uid].logprobs, atol=1e-5, rtol=0)
        for uid in expected
    )


def generate(pool: Pool, rank: int) -> dict[int, Response]:
    return asyncio.run(pool.responses(rank, prompts(12), greedy=True))


def reset(pool: Pool, *ranks: int, seed: int = OLD, version: int = 0) -> None:
    pool.call_actor("set_weights", seed, True)
    asyncio.run(pool.sync(*ranks).sync(version))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 40_000, 1 << 24])
def test_sync_equals_start_from_same_weights(pool: Pool, tied: bool, bucket_bytes: int) -> None:
    rank = 0 if tied else 2
    sync = pool.sync(rank, bucket_bytes=bucket_bytes)

    async def there_and_back() -> tuple[dict[int, Response], dict[int, Response]]:
        pool.call_actor("set_weights", NEW, tied)
        await sync.sync(1)
        new = await pool.responses(rank, prompts(12), greedy=True)
        pool.call_actor("set_weights", OLD, tied)
        await sync.sync(2)
        return new, await pool.responses(rank, prompts(12), greedy=True)

    new, old = asyncio.run(there_and_back())
    assert same(old, pool.fresh[rank]) and not same(new, pool.fresh[rank])
    assert not tied or same(new, pool.fresh[1])
    assert {response.weights_version for response in new.values()} == {1}
    assert {response.weights_version for response in old.values()} == {2}
    model = make_model(NEW, tied=tied)
    for prompt in prompts(12):
        expected = reference_logprobs(model, prompt, new[prompt.uid])
        np.testing.assert_allclose(new[prompt.uid].logprobs, expected, atol=1e-4)


def test_sync_tied_folder_that_stores_its_output_layer_updates_it(pool: Pool) -> None:
    reset(pool, 1)
    assert same(generate(pool, 1), pool.fresh[0])


@pytest.mark.parametrize("double_buffered", [True, False])
def test_sync_double_buffered_and_in_place_give_same_weights(pool: Pool, double_buffered: bool) -> None:
    reset(pool, 0)
    pool.call_actor("set_weights", NEW, True)
    asyncio.run(sync_by_phases(pool, double_buffered))
    assert same(generate(pool, 0), pool.fresh[1])


async def sync_by_phases(pool: Pool, double_buffered: bool, *, expect_failure: bool = False) -> None:
    """Call the phases of a sync to worker 0, with a fixed choice between double-buffered and in place."""
    worker, meta = pool.group(0), await pool.connect(0)
    await worker.call(RolloutWorker.begin_weight_update, 7, meta, timeout_s=PATIENCE_S, phase="begin")
    results = await pool.transfer(0, 7, meta, double_buffered)
    if expect_failure:
        assert all(isinstance(result, Exception) for result in results)
        await worker.call(RolloutWorker.drop_weights, timeout_s=PATIENCE_S, phase="drop")
    else:
        assert results[1][0].double_buffered is double_buffered
        await worker.call(RolloutWorker.commit_weights, 7, timeout_s=PATIENCE_S, phase="commit")


def test_generate_before_first_sync_raises() -> None:
    async def generate_at_once() -> None:
        worker = RolloutWorker(config_for(Path("none")), rank=1, device="cpu")
        async for _ in worker.generate(prompts(1), 17):
            pass

    with raises(WeightSyncError, worker="rollout worker 1", invalid=("rollout worker 1",)):
        asyncio.run(generate_at_once())


def test_sync_two_workers_get_same_version(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    reset(pool, 0, 1)
    assert not same(generate(pool, 1), pool.fresh[1])
    pool.call_actor("set_weights", NEW, True)
    with caplog.at_level(logging.INFO, logger="recipe_gkd.weight_sync.synchronizer"):
        metrics = asyncio.run(pool.sync(0, 1).sync(12))
    for rank in (0, 1):
        assert same(generate(pool, rank), pool.fresh[1])
        assert {response.weights_version for response in generate(pool, rank).values()} == {12}
    n_bytes = sum(p.numel() * 4 for p in make_model(NEW, tied=True).parameters())
    assert metrics["weights/megabytes"] == pytest.approx(n_bytes / 1e6, rel=0.01)
    assert 0 < metrics["timing/sync_rollout_weights_transfer"] < metrics["timing/sync_rollout_weights"]
    assert "weight sync v12: begins, 2 rollout workers" in caplog.text
    assert "MB/s), 2 rollout workers" in caplog.text


@pytest.mark.parametrize(
    "stall_s", [0.0, pytest.param(TRANSPORT_TIMEOUT_S + 2, marks=pytest.mark.slow)], ids=["raises", "stalls"]
)
def test_sync_in_place_failure_invalidates_until_full_sync(pool: Pool, stall_s: float) -> None:
    reset(pool, 0)
    pool.call_actor("set_weights", NEW, True)
    pool.call_actor("break_next_export", 8, stall_s)
    asyncio.run(sync_by_phases(pool, False, expect_failure=True))
    with raises(WeightSyncError, worker="rollout worker 0", invalid=("rollout worker 0",)):
        generate(pool, 0)
    assert asyncio.run(pool.sync(0).sync(9))["weights/version"] == 9
    assert same(generate(pool, 0), pool.fresh[1])


def test_sync_double_buffered_failure_keeps_old_version(pool: Pool) -> None:
    reset(pool, 0)
    before = generate(pool, 0)
    pool.call_actor("set_weights", NEW, True)
    pool.call_actor("break_next_export", 8, 0.0)
    asyncio.run(sync_by_phases(pool, True, expect_failure=True))
    after = generate(pool, 0)
    assert same(after, before) and {response.weights_version for response in after.values()} == {0}


def test_receive_without_sender_keeps_old_version(pool: Pool) -> None:
    reset(pool, 0)
    before = generate(pool, 0)

    async def only_receive() -> None:
        meta, worker = await pool.connect(0), pool.group(0)
        await worker.call(RolloutWorker.begin_weight_update, 5, meta, timeout_s=PATIENCE_S, phase="begin")
        await worker.call(RolloutWorker.receive_weights, 5, meta, 1 << 20, False, timeout_s=PATIENCE_S, phase="receive")

    with raises(WeightSyncError, worker="rollout worker 0") as caught:
        asyncio.run(only_receive())
    [failure] = caught.value.failures
    assert isinstance(failure, DeadlineError) and [name.split(" (")[0] for name in failure.missing] == [
        "actor worker 0"
    ]
    assert asyncio.run(pool.group(0).call(RolloutWorker.drop_weights, timeout_s=PATIENCE_S, phase="drop")) == [None]
    after = generate(pool, 0)
    assert same(after, before) and {response.weights_version for response in after.values()} == {0}


@pytest.mark.parametrize(
    ("old", "new"),
    [("model.norm.weight", "model.norm.scale"), ("model.layers.1.self_attn.k_proj.bias", "x")],
)
def test_sync_wrong_weight_names_raise_before_transfer(pool: Pool, old: str, new: str) -> None:
    reset(pool, 0)
    before = generate(pool, 0)
    pool.call_actor("set_weights", NEW, True)
    pool.call_actor("rename_weight", old, new)
    with raises(WeightSyncError, tensors=(old, new)):
        asyncio.run(pool.sync(0).sync(5))
    assert same(generate(pool, 0), before)


def test_sync_new_requests_wait_for_new_version(pool: Pool, folders: Any) -> None:
    reset(pool, 0)
    pool.call_actor("set_weights", NEW, True)

    async def overlap() -> tuple[dict[int, Response], dict[int, Response]]:
        early = asyncio.ensure_future(pool.responses(0, prompts(64)))
        sync = pool.sync(0, timeout_s=PATIENCE_S)
        await sync.connect()
        syncing = asyncio.ensure_future(sync.sync(4))
        late = asyncio.ensure_future(pool.responses(0, prompts(12), greedy=True))
        await syncing
        return await early, await late

    patient = config_for(
        folders[OLD, True], "actor_rollout_ref.nccl_timeout=60"
    )  # 64 responses take long on a busy machine
    with pool.configured(0, patient):
        early, late = asyncio.run(overlap())
    assert len(early) == 64 and {response.weights_version for response in early.values()} <= {0, 4}
    assert len({response.weights_version for response in late.values()}) == 1
    assert same(generate(pool, 0), pool.fresh[1])


def test_sync_dead_worker_is_named_and_others_keep_version(pool: Pool) -> None:
    reset(pool, 0)
    before = generate(pool, 0)
    pool.call_actor("set_weights", NEW, True)
    group = pool.group(0)
    doomed = ray.remote(num_cpus=0, runtime_env=environment())(DoomedWorker).remote()
    ray.get(doomed.setup.remote(), timeout=PATIENCE_S)
    group.handles.append(doomed)
    sync = make_synchronizer(pool.actor, group)
    asyncio.run(sync.connect())
    with pytest.raises(WeightSyncError) as caught:
        asyncio.run(sync.sync(2))
    assert "rollout worker 1 of 2" in culprits(caught.value)
    # The sender was interrupted: it did not wait for its deadline.
    assert not any(isinstance(failure, DeadlineError) for failure in caught.value.failures)
    after = generate(pool, 0)
    assert same(after, before) and {response.weights_version for response in after.values()} == {0}
