"""Tests of engines that sleep and wake: memory, weights, responses, and what they refuse in each state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from recipe_gkd.commands.gpu_smoke.reference import sampled_logps
from recipe_gkd.data.samples import Response
from recipe_gkd.errors import WeightSyncError, WorkerError
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.errors import raises
from tests._support.rollout_models import VOCABULARY, config_for, make_model, prompts
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import NEW, OLD, TRANSPORT_TIMEOUT_S, Pool, generate_on, make_synchronizer

CACHE_BYTES = 64 << 20
"""Size of the KV cache in ``config_for``."""
IDS = [5, 17, 203, 4, 4, 299, 18, 30]
Folders = dict[tuple[int, bool], Path]


def call(group: WorkerGroup[RolloutWorker], method: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(group.call(method, *args, timeout_s=PATIENCE_S, phase=method.__name__))[0]


def log_probs(group: WorkerGroup, ids: list[int] = IDS) -> list[float]:
    found: list[float] = call(group, RolloutWorker.log_probs, ids)
    return found


def expected_log_probs(seed: int, *, tied: bool) -> np.ndarray:
    return sampled_logps(make_model(seed, tied=tied), IDS, prompt_len=1)


def responses(group: WorkerGroup) -> dict[int, Response]:
    return asyncio.run(generate_on(group, 0, prompts(12), step=3))


def same(found: dict[int, Response], expected: dict[int, Response]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[i].ids, expected[i].ids) for i in expected)


@contextmanager
def hybrid_worker(pool: Pool, rank: int, folders: Folders, level: int) -> Iterator[WorkerGroup]:
    """Yield one worker of the pool as a hybrid engine, with the weights OLD as version 0. It wakes at the end."""
    tied = rank != 2
    pool.call_actor("set_weights", OLD, tied)
    asyncio.run(pool.sync(rank).sync(0))
    config = config_for(
        folders[OLD, tied],
        f"actor_rollout_ref.nccl_timeout={TRANSPORT_TIMEOUT_S}",
        "actor_rollout_ref.hybrid_engine=true",
        "trainer.scheduler=sync",
        f"actor_rollout_ref.rollout.sleep_level={level}",
    )
    group = pool.group(rank)
    try:
        with pool.configured(rank, config):
            yield group
    finally:
        for part in ("weights", "kv_cache"):
            call(group, RolloutWorker.wake, part)
        pool.call_actor("set_weights", OLD, tied)
        asyncio.run(pool.sync(rank).sync(0))


LABEL = "rollout worker 0"


def test_level_1_releases_the_cache_and_keeps_responses(pool: Pool, folders: Folders) -> None:
    with hybrid_worker(pool, 0, folders, 1) as group:
        before = responses(group)
        for _ in range(2):
            call(group, RolloutWorker.reset_peak_memory)
            slept = call(group, RolloutWorker.sleep)
            assert slept.level == 1 and slept.released_bytes > 0.9 * CACHE_BYTES
            assert call(group, RolloutWorker.sleep).released_bytes == 0  # sleeps already
            for refused in (lambda: responses(group), lambda: log_probs(group)):
                with raises(WorkerError, worker=LABEL):
                    refused()
            with raises(WorkerError, worker=LABEL):
                call(group, RolloutWorker.wake, "kv_cache")
            call(group, RolloutWorker.wake, "weights")
            with raises(WorkerError, worker=LABEL):
                responses(group)
            for part in ("kv_cache", "kv_cache", "weights"):
                call(group, RolloutWorker.wake, part)
            assert call(group, RolloutWorker.peak_memory) > CACHE_BYTES
            assert same(responses(group), before)
        np.testing.assert_allclose(log_probs(group), expected_log_probs(OLD, tied=True), atol=1e-4)


def test_level_2_needs_a_weight_sync(pool: Pool, folders: Folders) -> None:
    with hybrid_worker(pool, 0, folders, 2) as group:
        before = responses(group)
        assert call(group, RolloutWorker.sleep).released_bytes > 0.9 * CACHE_BYTES
        with pytest.raises(WeightSyncError):
            asyncio.run(pool.sync(0).sync(5))
        call(group, RolloutWorker.wake, "weights")
        call(group, RolloutWorker.sleep)  # also without its KV cache
        call(group, RolloutWorker.wake, "weights")
        with raises(WeightSyncError, worker=LABEL, invalid=(LABEL,), tensors=()):
            responses(group)
        pool.call_actor("set_weights", NEW, True)
        asyncio.run(pool.sync(0).sync(6))
        call(group, RolloutWorker.wake, "kv_cache")
        after = responses(group)
        assert not same(after, before) and {response.weights_version for response in after.values()} == {6}
        np.testing.assert_allclose(log_probs(group), expected_log_probs(NEW, tied=True), atol=1e-4)
        call(group, RolloutWorker.sleep)
        for part in ("weights", "kv_cache"):
            call(group, RolloutWorker.wake, part)
        with raises(WeightSyncError, worker=LABEL, invalid=(LABEL,), tensors=()):
            log_probs(group)


def test_level_0_does_nothing(pool: Pool, folders: Folders) -> None:
    with hybrid_worker(pool, 0, folders, 0) as group:
        assert call(group, RolloutWorker.sleep).released_bytes == 0
        assert len(responses(group)) == 12


def change(worker: Any, kind: str) -> str:
    """Change one value of the worker's model, and return the name of the parameter or buffer."""
    names: list[str] = worker._engine.run(lambda engine: engine.collective_rpc(_change, args=(kind,))).result(
        PATIENCE_S
    )
    return names[0]


def _change(rank: Any, kind: str) -> str:
    tensors = getattr(rank.model_runner.model, f"named_{kind}")()
    name, tensor = next((name, tensor) for name, tensor in tensors if tensor.numel() > 1)
    tensor.data.view(-1)[1] += 0.5
    return name


def test_level_1_changed_parameter_is_found_and_repaired_by_a_sync(pool: Pool, folders: Folders) -> None:
    with hybrid_worker(pool, 0, folders, 1) as group:
        before = responses(group)
        call(group, RolloutWorker.sleep)
        name = ray.get(pool.handles[0].__ray_call__.remote(change, "parameters"), timeout=PATIENCE_S)
        with raises(WeightSyncError, worker=LABEL, invalid=(LABEL,), tensors=(name,)):
            call(group, RolloutWorker.wake, "weights")
        call(group, RolloutWorker.wake, "kv_cache")
        with raises(WeightSyncError, worker=LABEL, invalid=(LABEL,), tensors=(name,)):
            responses(group)
        asyncio.run(pool.sync(0).sync(7))
        assert same(responses(group), before)


def test_log_probs_equal_transformers_and_exclude_padding(pool: Pool, folders: Folders) -> None:
    with hybrid_worker(pool, 2, folders, 0) as group:
        for _ in range(2):  # the second time the prompt is in the prefix cache
            np.testing.assert_allclose(log_probs(group), expected_log_probs(OLD, tied=False), atol=1e-4)
        pool.call_actor("set_weights", NEW, False)
        asyncio.run(pool.sync(2).sync(1))
        np.testing.assert_allclose(log_probs(group), expected_log_probs(NEW, tied=False), atol=1e-4)
        assert log_probs(group, [5, VOCABULARY]) == [float("-inf")]
        for ids in ([5], [5] * 80):
            with raises(WorkerError, keys=("actor_rollout_ref.rollout.max_model_len",)):
                log_probs(group, ids)


def test_sleep_with_requests_in_flight_is_refused(pool: Pool, folders: Folders) -> None:
    async def sleep_early(group: WorkerGroup) -> int:
        stream = group.stream(
            0, RolloutWorker.generate, prompts(200), 0, "train", timeout_s=PATIENCE_S, phase="generate"
        )
        n_responses = len(await anext(stream))
        assert n_responses < 200
        with raises(WorkerError, worker=LABEL, keys=()):
            await group.call(RolloutWorker.sleep, timeout_s=PATIENCE_S, phase="sleep")
        return n_responses + sum([len(batch) async for batch in stream])

    with hybrid_worker(pool, 0, folders, 1) as group:
        assert asyncio.run(sleep_early(group)) == 200


@pytest.mark.slow
def test_tp2_engine_sleeps_and_wakes(pool: Pool, tensor_pair: WorkerGroup, folders: Folders) -> None:
    config = config_for(
        folders[OLD, True],
        "actor_rollout_ref.hybrid_engine=true",
        "trainer.scheduler=sync",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.sleep_level=2",
        f"actor_rollout_ref.nccl_timeout={TRANSPORT_TIMEOUT_S}",
    )
    pair = Pool([tensor_pair.handles[0]], [], pool.actor, {})
    sync = make_synchronizer(pool.actor, tensor_pair, tensor_parallel_size=2)
    pool.call_actor("set_weights", OLD, True)
    asyncio.run(sync.sync(0))
    with pair.configured(0, config):
        before = responses(tensor_pair)
        resting = call(tensor_pair, RolloutWorker.sleep)
        assert resting.released_bytes > 0.9 * 2 * CACHE_BYTES
        call(tensor_pair, RolloutWorker.wake, "weights")
        asyncio.run(sync.sync(1))
        call(tensor_pair, RolloutWorker.wake, "kv_cache")
        assert same(responses(tensor_pair), before)
        np.testing.assert_allclose(log_probs(tensor_pair), expected_log_probs(OLD, tied=True), atol=1e-4)
        call(tensor_pair, RolloutWorker.reset_peak_memory)
        assert call(tensor_pair, RolloutWorker.peak_memory) > 3 * (100 << 20)  # three processes
