"""An engine of two worker processes: the same answers, and weight updates that reach both, even after a failed one."""

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
from recipe_gkd.runtime.process_id import is_alive
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from tests.integration.rollout.conftest import CHANNEL_TIMEOUT_S, NEW, OLD, Pool, answers_of
from tests.integration.rollout.small_models import model_of, prompts, reference_logprobs


def synchronizer(pool: Pool, group: WorkerGroup) -> WeightSynchronizer:
    return WeightSynchronizer(
        pool.actor,
        group,
        tensor_parallel_size=2,
        bucket_bytes=30_000,
        timeout_s=CHANNEL_TIMEOUT_S,
        transport="collective",
    )


@pytest.mark.timeout(240)
def test_two_tensor_ranks_generate_and_are_updated_as_one(pool: Pool, tensor_pair: WorkerGroup) -> None:
    sync = synchronizer(pool, tensor_pair)
    given = prompts(12)

    def check(seed: int, version: int) -> None:
        model, found = model_of(seed, tied=True), asyncio.run(answers_of(tensor_pair, 0, given))
        for prompt in given:
            response = found[prompt.uid]
            assert response.weights_version == version
            np.testing.assert_allclose(response.logprobs, reference_logprobs(model, prompt, response), atol=1e-4)

    pool.tell_actor("become", NEW, True)
    asyncio.run(sync.sync(3))
    check(NEW, 3)
    pool.tell_actor("become", OLD, True)
    pool.tell_actor("misbehave", 8, 0.0)
    assert asyncio.run(sync.sync(4))["weights/retries"] == 1
    check(OLD, 4)


def test_each_tensor_rank_can_be_looked_into_where_py_spy_is_not_allowed_to(tensor_pair: WorkerGroup) -> None:
    (place,) = asyncio.run(locate(tensor_pair.handles))
    stacks = [node_agent._faulthandler_stacks(one.pid, time.monotonic() + 2) for one in process_trees.tree([place.pid])]
    assert sum("worker_busy_loop" in text for text in stacks) == 2


class Successor:
    """Takes the place of a worker that died; not an engine, which would take seconds to start."""

    def setup(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_a_worker_whose_tensor_rank_is_killed_counts_as_dead_and_is_replaced(
    pool: Pool, tensor_pair: WorkerGroup
) -> None:
    """The last test here: it ends the engine, whose own process lives on, so that Ray takes it for alive."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    successor = ray.remote(num_cpus=0)(Successor)

    async def scenario() -> None:
        restarts = RolloutRestarts(tensor_pair, lambda _: successor.remote(), allowed=1, timeout_s=60)
        await synchronizer(pool, tensor_pair).sync(5)
        await restarts.record_processes([0])
        (place,) = await locate(tensor_pair.handles)
        processes = process_trees.tree([place.pid])
        [rank] = [one.pid for one in processes if "VLLM::Worker_TP1" in psutil.Process(one.pid).name()]
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rollout worker 0: the rollout engine failed"):
            await answers_of(tensor_pair, 0, prompts(4))
        assert await tensor_pair.dead() == [0] and not (await locate(tensor_pair.handles))[0].dead
        await restarts.replace_dead()
        assert not [one.pid for one in processes if is_alive(one)]
        assert await tensor_pair.dead() == []

    asyncio.run(asyncio.wait_for(scenario(), 120))
