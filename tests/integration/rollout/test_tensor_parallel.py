"""Tests of an engine with two tensor-parallel ranks: generation, weight updates, and the death of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
import ray
import ray.cloudpickle

from recipe_gkd.diagnostics import node_agent
from recipe_gkd.errors import WorkerDied
from recipe_gkd.ray_cluster.node_probe import locate
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime import process_trees
from teacher.common.process_id import is_alive
from tests._support.errors import raises
from tests._support.rollout_models import make_model, prompts, reference_logprobs
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import NEW, OLD, Pool, generate_on, make_synchronizer

pytestmark = pytest.mark.slow  # the engine of a pair takes a minute to start


def test_tp2_engine_generates_and_updates(pool: Pool, tensor_pair: WorkerGroup) -> None:
    sync = make_synchronizer(pool.actor, tensor_pair, tensor_parallel_size=2)
    given = prompts(12)

    def check(seed: int, version: int) -> None:
        model, found = make_model(seed, tied=True), asyncio.run(generate_on(tensor_pair, 0, given))
        for prompt in given:
            response = found[prompt.uid]
            assert response.weights_version == version
            np.testing.assert_allclose(response.logprobs, reference_logprobs(model, prompt, response), atol=1e-4)

    pool.call_actor("set_weights", NEW, True)
    asyncio.run(sync.sync(3))
    check(NEW, 3)
    pool.call_actor("set_weights", OLD, True)
    pool.call_actor("break_next_export", 8, 0.0)
    assert asyncio.run(sync.sync(4))["weights/retries"] == 1
    check(OLD, 4)


def test_tp2_engine_dumps_stacks_of_each_rank(tensor_pair: WorkerGroup) -> None:
    (place,) = asyncio.run(locate(tensor_pair.handles))
    stacks = [node_agent._faulthandler_stacks(one.pid, time.monotonic() + 2) for one in process_trees.tree([place.pid])]
    assert sum("worker_busy_loop" in text for text in stacks) == 2


class ReplacementWorker:
    """Replacement of a dead worker, without an engine, which would take seconds to start."""

    def setup(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_tp2_engine_killed_rank_worker_is_replaced(pool: Pool, tensor_pair: WorkerGroup) -> None:
    """Run this test last: it kills the engine. The worker's process, which is the Ray actor, stays alive."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    replacement = ray.remote(num_cpus=0)(ReplacementWorker)

    async def scenario() -> None:
        restarts = RolloutRestarts(tensor_pair, lambda _: replacement.remote(), allowed=1, timeout_s=PATIENCE_S)
        await make_synchronizer(pool.actor, tensor_pair, tensor_parallel_size=2).sync(5)
        await restarts.record_processes([0])
        (place,) = await locate(tensor_pair.handles)
        processes = process_trees.tree([place.pid])
        [rank] = [one.pid for one in processes if "VLLM::Worker_TP1" in psutil.Process(one.pid).name()]
        os.kill(rank, signal.SIGKILL)
        with raises(WorkerDied) as caught:
            await generate_on(tensor_pair, 0, prompts(4))
        # The label has the number of workers if the death is noticed before the engine accepts the prompts.
        assert caught.value.worker in ("rollout worker 0", "rollout worker 0 of 1") and caught.value.process
        assert await tensor_pair.dead() == [0] and not (await locate(tensor_pair.handles))[0].dead
        await restarts.replace_dead()
        assert not [one.pid for one in processes if is_alive(one)]
        assert await tensor_pair.dead() == []

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
