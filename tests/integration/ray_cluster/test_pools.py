"""Resource pools: what fits, what is refused and how, and where workers land."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray
from ray._private.state import available_resources_per_node

from recipe_gkd.config import load_config
from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster import capacity
from recipe_gkd.ray_cluster.node_probe import own_node
from recipe_gkd.ray_cluster.pools import PoolSpec, choose_nodes, create_pools, pool_specs

GPUS = dict(CPU=8.0, GPU=4.0)


def specs(device: str = "cuda", *overrides: str, **sizes: int) -> tuple[PoolSpec, ...]:
    keys = dict(
        actor_nodes="trainer.nnodes",
        actor="trainer.n_gpus_per_node",
        rollout_nodes="rollout.nnodes",
        rollout="rollout.n_gpus_per_node",
    )
    places = [f"{keys[name]}={n}" for name, n in sizes.items()]
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=x"]
    config = load_config("on_policy_distill_trainer", [*needed, *places, *overrides])
    return pool_specs(config, device)


@pytest.mark.parametrize(
    ("sizes", "nodes", "fit"),
    [
        (dict(actor=2, rollout=2), [GPUS], True),
        (dict(actor=3, rollout=2), [GPUS], False),
        (dict(actor=4, rollout=4), [GPUS, GPUS], True),
        (dict(actor=3, rollout=3), [GPUS, GPUS], True),
        (
            dict(actor=2, rollout=2, actor_nodes=2),
            [GPUS, GPUS],
            True,
        ),  # the rollout pool cannot be split over nodes ...
        (dict(actor=3, rollout=2, actor_nodes=2), [GPUS, GPUS], False),  # ... so one left on each is not two
        (dict(actor=1, rollout=1, actor_nodes=2), [GPUS], False),  # two nodes asked, one there
    ],
)
def test_a_layout_fits_if_each_bundle_finds_a_node(
    sizes: dict[str, int], nodes: list[dict[str, float]], fit: bool
) -> None:
    assert (choose_nodes(specs(**sizes), nodes) is not None) == fit


def test_cpu_slots_lay_out_the_same_numbers() -> None:
    assert choose_nodes(specs("cpu", actor=2, rollout=2), [dict(CPU=4.0)])
    assert not choose_nodes(specs("cpu", actor=2, rollout=3), [dict(CPU=4.0)])


@pytest.mark.usefixtures("ray_session")
def test_too_few_resources_say_what_was_asked_and_what_there_is() -> None:
    with pytest.raises(ResourceError) as caught:
        asyncio.run(create_pools(specs("cpu", actor=64, rollout=1), timeout_s=10))
    message = str(caught.value)
    assert "actor pool: 1 x 64 CPU slots   (trainer.nnodes x trainer.n_gpus_per_node)" in message
    assert "node 0: 8 CPU, 0 GPU" in message and "ray_init.num_cpus" in message


@pytest.mark.usefixtures("ray_session")
def test_workers_get_their_slots_their_arguments_and_their_environment() -> None:
    class Worker:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def report(self) -> dict[str, Any]:
            import os

            return dict(
                rank=self.rank, env=os.environ["MARK"], cpus=ray.get_runtime_context().get_assigned_resources()["CPU"]
            )

    pair = specs("cpu", "actor_rollout_ref.rollout.tensor_model_parallel_size=2", actor=2, rollout=4)
    pools = asyncio.run(create_pools(pair, timeout_s=20))
    assert [pool.spec.n_workers for pool in pools] == [2, 2]
    handles = [pools[1].spawn(Worker, rank, dict(rank=rank), env={"MARK": "x"}) for rank in range(2)]
    assert ray.get([handle.report.remote() for handle in handles], timeout=30) == [
        dict(rank=0, env="x", cpus=2.0),
        dict(rank=1, env="x", cpus=2.0),
    ]
    for handle in handles:
        ray.kill(handle)
    for pool in pools:
        pool.release()


@pytest.mark.usefixtures("ray_session")
def test_a_worker_that_died_leaves_its_slot_to_the_next_of_its_rank() -> None:
    class Worker:
        def bundle(self) -> int:
            return 7

    (pool, _) = pools = asyncio.run(create_pools(specs("cpu", actor=2, rollout=1), timeout_s=20))
    handles = [pool.spawn(Worker, rank, {}) for rank in range(2)]
    ray.get([handle.bundle.remote() for handle in handles], timeout=30)
    ray.kill(handles[0])
    again = pool.spawn(Worker, 0, {})
    assert ray.get(again.bundle.remote(), timeout=30) == 7
    for handle in (again, handles[1]):
        ray.kill(handle)
    for pool in pools:
        pool.release()


@pytest.mark.usefixtures("ray_session")
def test_shared_slots_take_an_actor_and_a_rollout_worker_each_and_no_more_of_the_cluster() -> None:
    class Worker:
        def cpus(self) -> float:
            return float(ray.get_runtime_context().get_assigned_resources()["CPU"])

    pools = asyncio.run(create_pools(specs("cpu", "rollout.share_actor_gpus=true", actor=6, rollout=6), timeout_s=20))
    handles = [pool.spawn(Worker, rank, {}) for pool in pools for rank in range(2)]
    assert ray.get([handle.cpus.remote() for handle in handles], timeout=30) == [0.5] * 4
    for handle in handles:
        ray.kill(handle)
    for pool in pools:
        pool.release()


@pytest.mark.usefixtures("ray_session")
def test_pools_that_others_hold_are_waited_for_until_the_deadline_only() -> None:
    held = asyncio.run(create_pools(specs("cpu", actor=4, rollout=3), timeout_s=20))
    with pytest.raises(
        ResourceError, match=r"not granted within 1 s: the cluster is large enough, but others use it now"
    ):
        asyncio.run(create_pools(specs("cpu", actor=2, rollout=2), timeout_s=1))
    for pool in held:
        pool.release()
    for pool in asyncio.run(create_pools(specs("cpu", actor=4, rollout=4), timeout_s=20)):  # nothing was left reserved
        pool.release()


@pytest.mark.usefixtures("ray_session")
def test_the_capacity_is_what_others_leave_and_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    others = asyncio.run(create_pools(specs("cpu", actor=3, rollout=1), timeout_s=20))
    own = asyncio.run(create_pools(specs("cpu", actor=2, rollout=1), timeout_s=20))
    try:
        ends_at = time.monotonic() + 20
        while available_resources_per_node()[own_node()].get("CPU", 0) != 1 and time.monotonic() < ends_at:
            time.sleep(0.1)  # Ray publishes it a moment later
        monkeypatch.setattr(capacity, "physical_cores", lambda: 8)
        found = capacity.cluster_capacity(own)
        assert found.cores == 4
        assert found.grants((1, 2), (1, 2)) and not found.grants((1, 3), (1, 2))
        monkeypatch.setattr(capacity, "physical_cores", lambda: 3)
        found = capacity.cluster_capacity(own)
        assert found.cores == 3 and not found.grants((1, 2), (1, 2))
    finally:
        for pool in others + own:
            pool.release()
