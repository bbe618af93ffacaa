"""A program: a Ray cluster of two nodes in this process, what pools and workers do on it, and JSON about that."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from recipe_gkd.commands import check_devices
from recipe_gkd.config import load_config
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.errors import DeadlineError, ResourceError, WorkerDied
from recipe_gkd.ray_cluster.pools import Pool, create_pools, pool_specs
from recipe_gkd.ray_cluster.worker_group import WorkerGroup


class Worker:
    def place(self) -> tuple[str, str, int]:
        context = ray.get_runtime_context()
        return context.get_node_id(), ",".join(context.get_accelerator_ids()["GPU"]), os.getpid()

    def hang_by_intention(self) -> None:
        time.sleep(1000)

    def shutdown(self) -> None:
        pass


def overrides(actors: str, rollouts: str, *more: str) -> list[str]:
    keys = [
        f"{pool}.{key}={n}"
        for pool, size in (("trainer", actors), ("rollout", rollouts))
        for key, n in zip(("nnodes", "n_gpus_per_node"), size.split("x"), strict=True)
    ]
    return [*keys, *more]


async def reserve(device: str, *arguments: str) -> tuple[Pool, ...]:
    config = load_config(
        "on_policy_distill_trainer", [*overrides(*arguments), "data.train_files=x", "actor_rollout_ref.model.path=x"]
    )
    return await create_pools(pool_specs(config, device), timeout_s=30)


async def start(device: str, *arguments: str) -> tuple[tuple[Pool, ...], WorkerGroup, WorkerGroup]:
    pools = await reserve(device, *arguments)
    sizes = [pool.spec.nnodes * pool.spec.n_per_node for pool in pools]
    rollouts = [pools[1].spawn(Worker, rank, {}) for rank in reversed(range(sizes[1]))][::-1]
    actors = [pools[0].spawn(Worker, rank, {}) for rank in range(sizes[0])]
    return pools, WorkerGroup("actor", actors), WorkerGroup("rollout", rollouts)


async def places(group: WorkerGroup) -> list[Any]:
    return await group.call("place", timeout_s=60, phase="look")


async def end(pools: tuple[Pool, ...], *groups: WorkerGroup) -> float:
    started = time.monotonic()
    await asyncio.gather(*(group.stop(timeout_s=5) for group in groups))
    for pool in pools:
        pool.release()
    return time.monotonic() - started


async def land_beside(held: str) -> set[str]:
    """Where shared pools of one node's size land while another job holds a GPU of the node ``held``."""
    job = placement_group([{"GPU": 1}], bundle_label_selector=[{"ray.io/node-id": held}])
    await job.ready()
    pools = await reserve("cuda", "1x2", "1x2", "rollout.share_actor_gpus=true")
    landed = set(placement_group_table(pools[0].group)["bundles_to_node_id"].values())
    for group in (pools[0].group, job):
        remove_placement_group(group)
    return landed


async def scenario(cluster: Cluster, second: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"second": second.node_id}
    try:
        await start("cpu", "3x1", "1x1")
    except ResourceError as error:
        told["refused"] = str(error)

    began = time.monotonic()
    told["beside"] = [(node, list(await land_beside(node))) for node in (cluster.head_node.node_id, second.node_id)]
    told["beside_s"] = time.monotonic() - began

    pools, actors, rollouts = await start("cuda", "2x2", "2x2", "rollout.share_actor_gpus=true")
    told["actors"], told["rollouts"] = await places(actors), await places(rollouts)
    other, there = (rank for rank, place in enumerate(told["actors"]) if place[0] == second.node_id)
    stopped = told["actors"][other][2]
    os.kill(stopped, signal.SIGSTOP)
    try:
        await actors.call("hang_by_intention", timeout_s=1, phase="update")
    except DeadlineError as error:
        with tempfile.TemporaryDirectory() as root:
            started = time.monotonic()
            folder = await diagnose(error, [actors, rollouts], Path(root))
            told["diagnosis_s"] = time.monotonic() - started
            assert folder is not None
            told["stacks"] = {file.name: file.read_text() for file in folder.glob("*.stacks.txt")}
        told["silent"] = [there, other]
    told["stop_s"] = await end((), actors)
    told["left"] = [place[2] for place in told["actors"] if _lives(place[2])]

    hanging = asyncio.create_task(rollouts.call("hang_by_intention", timeout_s=60, phase="generate"))
    await asyncio.sleep(0.5)
    started = time.monotonic()
    await asyncio.to_thread(cluster.remove_node, second, allow_graceful=False)
    try:
        await hanging
    except WorkerDied as error:
        told["death"] = dict(message=str(error), s=time.monotonic() - started)
        told["dead"] = await rollouts.dead()
    told["stop_after_death_s"] = await end(pools, rollouts)
    return told


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def main() -> None:
    node = dict(num_cpus=3, num_gpus=2, object_store_memory=80 << 20)
    cluster = Cluster(initialize_head=True, head_node_args=node | dict(include_dashboard=False))
    try:
        second = cluster.add_node(**node)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            keys = overrides("2x2", "2x1", f"ray_init.address={cluster.address}", "trainer.device=cpu")
            status = check_devices.main(keys)
        ray.init(address=cluster.address, log_to_driver=False)
        told = asyncio.run(scenario(cluster, second))
        print("told " + json.dumps(told | dict(status=status, output=output.getvalue(), errors=errors.getvalue())))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
