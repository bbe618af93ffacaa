"""From a real sender to real engines in Ray actors: what they generate with afterwards, and after every failure."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from recipe_gkd.data.samples import Response
from recipe_gkd.errors import WeightSyncError
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from tests.integration.rollout.conftest import CHANNEL_TIMEOUT_S, NEW, OLD, Pool, environment
from tests.integration.rollout.small_models import DoomedWorker, config_for, model_of, prompts, reference_logprobs


def same(found: dict[int, Response], expected: dict[int, Response]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[uid].ids, expected[uid].ids)
        and np.allclose(found[uid].logprobs, expected[uid].logprobs, atol=1e-5, rtol=0)
        for uid in expected
    )


def generate(pool: Pool, rank: int) -> dict[int, Response]:
    return asyncio.run(pool.responses(rank, prompts(12), greedy=True))


def reset(pool: Pool, *ranks: int, seed: int = OLD, version: int = 0) -> None:
    pool.tell_actor("become", seed, True)
    asyncio.run(pool.sync(*ranks).sync(version))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 40_000, 1 << 24])
def test_an_engine_after_a_sync_equals_one_started_from_the_same_weights(
    pool: Pool, tied: bool, bucket_bytes: int
) -> None:
    rank = 0 if tied else 2
    sync = pool.sync(rank, bucket_bytes=bucket_bytes)

    async def there_and_back() -> tuple[dict[int, Response], dict[int, Response]]:
        pool.tell_actor("become", NEW, tied)
        await sync.sync(1)
        new = await pool.responses(rank, prompts(12), greedy=True)
        pool.tell_actor("become", OLD, tied)
        await sync.sync(2)
        return new, await pool.responses(rank, prompts(12), greedy=True)

    new, old = asyncio.run(there_and_back())
    assert same(old, pool.fresh[rank]) and not same(new, pool.fresh[rank])
    assert not tied or same(new, pool.fresh[1])
    assert {response.weights_version for response in new.values()} == {1}
    assert {response.weights_version for response in old.values()} == {2}
    model = model_of(NEW, tied=tied)
    for prompt in prompts(12):
        expected = reference_logprobs(model, prompt, new[prompt.uid])
        np.testing.assert_allclose(new[prompt.uid].logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("staged", [True, False])
def test_weights_that_are_staged_and_weights_that_are_streamed_end_the_same(pool: Pool, staged: bool) -> None:
    reset(pool, 0)
    pool.tell_actor("become", NEW, True)
    asyncio.run(staged_sync(pool, staged))
    assert same(generate(pool, 0), pool.fresh[1])


async def staged_sync(pool: Pool, staged: bool, *, expect_failure: bool = False) -> None:
    """The calls of a sync to worker 0, with the choice between staging and streaming taken out of its hands."""
    worker, meta = pool.group(0), await pool.connect(0)
    await worker.call("begin_weight_update", 7, meta, timeout_s=10, phase="begin")
    results = await pool.transfer(0, 7, meta, staged)
    if expect_failure:
        assert all(isinstance(result, Exception) for result in results)
        await worker.call("drop_weights", timeout_s=10, phase="drop")
    else:
        assert results[1][0]["staged"] is staged
        await worker.call("commit_weights", 7, timeout_s=10, phase="commit")


def test_a_worker_that_was_started_in_the_middle_of_a_run_refuses_until_its_first_sync() -> None:
    async def generate_at_once() -> None:
        worker = RolloutWorker(config_for(Path("none")), rank=1, device="cpu")
        async for _ in worker.generate(prompts(1), 17):
            pass

    with pytest.raises(WeightSyncError, match="rollout worker 1 refuses to generate: it has no weights version yet"):
        asyncio.run(generate_at_once())


def test_two_workers_get_one_version_in_one_sync(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    reset(pool, 0, 1)
    assert not same(generate(pool, 1), pool.fresh[1])
    pool.tell_actor("become", NEW, True)
    with caplog.at_level(logging.INFO, logger="recipe_gkd.weight_sync.synchronizer"):
        numbers = asyncio.run(pool.sync(0, 1).sync(12))
    for rank in (0, 1):
        assert same(generate(pool, rank), pool.fresh[1])
        assert {response.weights_version for response in generate(pool, rank).values()} == {12}
    n_bytes = sum(p.numel() * 4 for p in model_of(NEW, tied=True).parameters())
    assert numbers["weights/megabytes"] == pytest.approx(n_bytes / 1e6, rel=0.01)
    assert 0 < numbers["timing/sync_rollout_weights_transfer"] < numbers["timing/sync_rollout_weights"] < 5
    assert "weight sync v12: begins, 2 rollout workers" in caplog.text
    assert "MB/s), 2 rollout workers" in caplog.text


@pytest.mark.parametrize("stall_s", [0.0, CHANNEL_TIMEOUT_S + 2], ids=["raises", "stalls"])
def test_a_streamed_update_that_stops_midway_makes_the_worker_refuse_until_a_full_sync(
    pool: Pool, stall_s: float
) -> None:
    reset(pool, 0)
    pool.tell_actor("become", NEW, True)
    pool.tell_actor("misbehave", 8, stall_s)
    started = time.monotonic()
    asyncio.run(staged_sync(pool, False, expect_failure=True))
    assert time.monotonic() - started < (stall_s + 10 if stall_s else CHANNEL_TIMEOUT_S)
    with pytest.raises(WeightSyncError, match="rollout worker 0 refuses to generate: it may hold a mixture"):
        generate(pool, 0)
    assert asyncio.run(pool.sync(0).sync(9))["weights/version"] == 9
    assert same(generate(pool, 0), pool.fresh[1])


def test_a_staged_update_that_stops_midway_leaves_the_old_version(pool: Pool) -> None:
    reset(pool, 0)
    before = generate(pool, 0)
    pool.tell_actor("become", NEW, True)
    pool.tell_actor("misbehave", 8, 0.0)
    asyncio.run(staged_sync(pool, True, expect_failure=True))
    after = generate(pool, 0)
    assert same(after, before) and {response.weights_version for response in after.values()} == {0}


def test_a_sender_that_never_comes_leaves_the_old_version(pool: Pool) -> None:
    reset(pool, 0)
    before = generate(pool, 0)

    async def only_receive() -> None:
        meta, worker = await pool.connect(0), pool.group(0)
        await worker.call("begin_weight_update", 5, meta, timeout_s=10, phase="begin")
        await worker.call("receive_weights", 5, meta, 1 << 20, False, timeout_s=20, phase="receive")

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"weights v5, begin: actor worker 0 .* did not answer"):
        asyncio.run(only_receive())
    assert time.monotonic() - started < CHANNEL_TIMEOUT_S + 8
    assert asyncio.run(pool.group(0).call("drop_weights", timeout_s=10, phase="drop")) == [None]
    after = generate(pool, 0)
    assert same(after, before) and {response.weights_version for response in after.values()} == {0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model.norm.weight", "model.norm.scale", "model.norm.weight is missing; model.norm.scale is unknown"),
        ("model.layers.1.self_attn.k_proj.bias", "x", r"model.layers.1.self_attn.k_proj.bias is missing"),
    ],
)
def test_weights_under_wrong_names_are_refused_before_anything_is_sent(
    pool: Pool, old: str, new: str, message: str
) -> None:
    reset(pool, 0)
    before = generate(pool, 0)
    pool.tell_actor("become", NEW, True)
    pool.tell_actor("rename", old, new)
    with pytest.raises(WeightSyncError, match=message):
        asyncio.run(pool.sync(0).sync(5))
    assert same(generate(pool, 0), before)


def test_requests_wait_for_an_update_and_are_answered_with_the_new_version(pool: Pool, folders: Any) -> None:
    reset(pool, 0)
    pool.tell_actor("become", NEW, True)

    async def overlap() -> tuple[dict[int, Response], dict[int, Response]]:
        early = asyncio.ensure_future(pool.responses(0, prompts(64)))
        sync = pool.sync(0, timeout_s=30)
        await sync.connect()
        syncing = asyncio.ensure_future(sync.sync(4))
        late = asyncio.ensure_future(pool.responses(0, prompts(12), greedy=True))
        await syncing
        return await early, await late

    patient = config_for(folders[OLD, True], "actor_rollout_ref.nccl_timeout=30")  # 64 answers on a busy machine
    with pool.configured(0, patient):
        early, late = asyncio.run(overlap())
    assert len(early) == 64 and {response.weights_version for response in early.values()} <= {0, 4}
    assert len({response.weights_version for response in late.values()}) == 1
    assert same(generate(pool, 0), pool.fresh[1])


def test_a_worker_that_dies_midway_is_named_and_the_others_stay_usable(pool: Pool) -> None:
    reset(pool, 0)
    before = generate(pool, 0)
    pool.tell_actor("become", NEW, True)
    group = pool.group(0)
    doomed = ray.remote(num_cpus=0, runtime_env=environment())(DoomedWorker).remote()
    ray.get(doomed.setup.remote(), timeout=60)
    group.handles.append(doomed)
    sync = WeightSynchronizer(
        pool.actor,
        group,
        tensor_parallel_size=1,
        bucket_bytes=30_000,
        timeout_s=CHANNEL_TIMEOUT_S,
        transport="collective",
    )
    asyncio.run(sync.connect())
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="rollout worker 1 of 2 died"):
        asyncio.run(sync.sync(2))
    assert time.monotonic() - started < CHANNEL_TIMEOUT_S  # the sender was told, and did not wait for it
    after = generate(pool, 0)
    assert same(after, before) and {response.weights_version for response in after.values()} == {0}
