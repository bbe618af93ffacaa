"""Resource pools: what fits, what is refused and how, and where workers land."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from recipe_gkd.config import load_config
from recipe_gkd.errors import ResourceError
from recipe_gkd.pools import PoolSpec, check_devices, create_pools, fits, pool_specs

GPUS = dict(CPU=8.0, GPU=4.0)


def specs(device: str = "cuda", **sizes: int) -> tuple[PoolSpec, ...]:
    keys = dict(
        actor_nodes="trainer.nnodes",
        actor="trainer.n_gpus_per_node",
        rollout_nodes="rollout.nnodes",
        rollout="rollout.n_gpus_per_node",
    )
    config = load_config(
        "on_policy_distill_trainer",
        ["data.train_files=x", "actor_rollout_ref.model.path=x", *(f"{keys[name]}={n}" for name, n in sizes.items())],
    )
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
    assert fits(specs(**sizes), nodes) == fit


def test_cpu_slots_lay_out_the_same_numbers() -> None:
    assert fits(specs("cpu", actor=2, rollout=2), [dict(CPU=4.0)])
    assert not fits(specs("cpu", actor=2, rollout=3), [dict(CPU=4.0)])


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

    pools = asyncio.run(create_pools(specs("cpu", actor=2, rollout=4), timeout_s=20))
    handles = pools[1].spawn(Worker, [dict(rank=0), dict(rank=1)], slots=2, env={"MARK": "x"})
    assert ray.get([handle.report.remote() for handle in handles], timeout=30) == [
        dict(rank=0, env="x", cpus=2.0),
        dict(rank=1, env="x", cpus=2.0),
    ]
    for handle in handles:
        ray.kill(handle)
    for pool in pools:
        pool.release()


def test_two_workers_on_one_gpu_are_an_error_that_names_both() -> None:
    with pytest.raises(ResourceError, match="rollout worker 0 and actor worker 0 both got GPU-1 on node a"):
        check_devices(
            {"actor worker 0": dict(node="a", devices=["GPU-1"]), "rollout worker 0": dict(node="a", devices=["GPU-1"])}
        )
    check_devices({"a": dict(node="a", devices=["GPU-1"]), "b": dict(node="b", devices=["GPU-1"])})
    check_devices({"a": dict(node="a", devices=["cpu"]), "b": dict(node="a", devices=["cpu"])})


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
