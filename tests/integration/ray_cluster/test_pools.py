from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest
import ray
from ray._private.state import available_resources_per_node

from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster import capacity
from recipe_gkd.ray_cluster.node_probe import own_node
from recipe_gkd.ray_cluster.pools import Pool, create_pools
from tests._support.errors import raises
from tests._support.pool_specs import configured_specs
from tests._support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("ray_session")


class Worker:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def report(self) -> dict[str, Any]:
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU")
        return dict(rank=self.rank, env=os.environ.get("MARK"), cpus=cpus, niceness=os.nice(0))


class AsyncWorker:
    def __init__(self) -> None:
        self.resumed = asyncio.Event()

    async def generate_turn(self) -> None:
        await self.resumed.wait()

    async def commit_weights(self) -> None:
        self.resumed.set()


def create(*overrides: str, timeout_s: float = PATIENCE_S, **sizes: int) -> tuple[Pool, ...]:
    return asyncio.run(create_pools(configured_specs("cpu", *overrides, **sizes), timeout_s=timeout_s))


def release(pools: Sequence[Pool], handles: Sequence[Any] = ()) -> None:
    for handle in handles:
        ray.kill(handle)
    for pool in pools:
        pool.release()


class TestCreatePools:
    def test_too_few_resources_lists_request_and_cluster(self) -> None:
        with pytest.raises(ResourceError) as caught:
            create(actor=64, rollout=1, timeout_s=10)
        table = caught.value.details
        assert "  actor pool: 1 x 64 CPU slots   (trainer.nnodes x trainer.n_gpus_per_node)" in table
        assert "  node 0: 8 CPU, 0 GPU" in table and "ray_init.num_cpus" in table[-1]

    def test_resources_held_by_another_job_raises_at_the_deadline_and_reserves_nothing(self) -> None:
        held = create(actor=4, rollout=3)
        with raises(ResourceError, waited_s=0.5):
            create(actor=2, rollout=2, timeout_s=0.5)
        release(held)
        release(create(actor=4, rollout=4))


class TestSpawn:
    def test_worker_gets_its_slots_arguments_and_environment(self) -> None:
        pools = create("actor_rollout_ref.rollout.tensor_model_parallel_size=2", actor=2, rollout=4)
        assert [pool.spec.n_workers for pool in pools] == [2, 2]
        handles = [pools[1].spawn(Worker, rank, dict(rank=rank), env={"MARK": "x"}) for rank in range(2)]
        assert ray.get([handle.report.remote() for handle in handles], timeout=PATIENCE_S) == [
            dict(rank=rank, env="x", cpus=2.0, niceness=os.nice(0)) for rank in range(2)
        ]
        release(pools, handles)

    def test_slot_of_a_dead_worker_is_used_by_the_next_of_its_rank(self) -> None:
        pools = create(actor=2, rollout=1)
        handles = [pools[0].spawn(Worker, rank, {}) for rank in range(2)]
        ray.get([handle.report.remote() for handle in handles], timeout=PATIENCE_S)
        ray.kill(handles[0])
        successor = pools[0].spawn(Worker, 0, dict(rank=7))
        assert ray.get(successor.report.remote(), timeout=PATIENCE_S)["rank"] == 7
        release(pools, [successor, handles[1]])

    def test_async_worker_with_more_calls_than_rays_default_receives_another(self) -> None:
        pools = create(actor=1, rollout=1)
        worker = pools[1].spawn(AsyncWorker, 0, {})
        turns = [worker.generate_turn.remote() for _ in range(1100)]
        ray.get(worker.commit_weights.remote(), timeout=PATIENCE_S)
        ray.get(turns, timeout=PATIENCE_S)
        release(pools, [worker])

    def test_guests_hold_no_slots(self) -> None:
        pools = create("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync", actor=6, rollout=1)
        handles = [pool.spawn(Worker, rank, {}) for pool in pools for rank in range(2)]
        reports = ray.get([handle.report.remote() for handle in handles], timeout=PATIENCE_S)
        assert [float(report["cpus"] or 0) for report in reports] == [1.0, 1.0, 0.0, 0.0]
        assert pools[1].spec.n_workers == 6
        release(pools, handles)


def test_cluster_capacity_excludes_other_jobs_and_is_limited_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    others = create(actor=3, rollout=1)
    own = create(actor=2, rollout=1)
    try:
        # Ray publishes the free resources with a delay.
        wait_until(lambda: available_resources_per_node()[own_node()].get("CPU", 0) == 1)
        monkeypatch.setattr(capacity, "physical_cores", lambda: 8)
        found = capacity.cluster_capacity(own)
        assert found.cores == 4
        assert found.grants((1, 2), (1, 2)) and not found.grants((1, 3), (1, 2))
        monkeypatch.setattr(capacity, "physical_cores", lambda: 3)
        found = capacity.cluster_capacity(own)
        assert found.cores == 3 and not found.grants((1, 2), (1, 2))
    finally:
        release(others + own)
