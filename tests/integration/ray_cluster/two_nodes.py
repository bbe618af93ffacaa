"""Program that starts a Ray cluster of two nodes in one process, uses pools and workers on it, and prints JSON."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from recipe_gkd.commands import check_devices
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.errors import DeadlineError, ResourceError, WorkerDied
from recipe_gkd.ray_cluster.node_checks import check_nodes
from recipe_gkd.ray_cluster.placement import DeviceReport, environments_of_guests
from recipe_gkd.ray_cluster.pools import Pool, create_pools, pool_specs
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime.worker_variables import worker_variables
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from teacher.client import TeacherClient
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.records import TeacherSequence
from teacher.wire.auth import server_keys
from teacher.wire.make_keys import make_keys
from tests._support.base_config import base_config
from tests._support.fake_worker import INFO, FakeEngine, running_worker
from tests._support.processes import is_running
from tests._support.teacher_service import running_proxy
from tests._support.waiting import PATIENCE_S, wait_until_async

JSON_PREFIX = "facts "
HYBRID = "actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync"

VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "VLLM_HOST_IP", "MY_SETTING")
OF_THE_DRIVER = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_HOST_IP": "x"}
"""Variables that the driver gets after the nodes have started."""
OF_THE_CONFIG = ("ray_init.env_vars.NCCL_DEBUG=INFO", "+ray_init.env_vars.MY_SETTING=1")


class Worker:
    def location(self) -> tuple[str, str, int]:
        """Return node id, GPU ids and pid."""
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()

    def device_report(self) -> DeviceReport:
        """Return the GPUs that Ray assigned to this worker."""
        assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return DeviceReport(node="", host_memory=0, assigned=assigned)

    def variables(self) -> dict[str, str | None]:
        """Return the values of the environment variables ``VARIABLES``."""
        return {name: os.environ.get(name) for name in VARIABLES}

    def hang_by_intention(self) -> None:
        time.sleep(3600)

    def shutdown(self) -> None:
        pass


def overrides(actors: str, rollouts: str, *more: str) -> list[str]:
    """Return config overrides. ``actors`` and ``rollouts``: pool size as ``<nodes>x<slots per node>``."""
    keys = [
        f"{pool}.{key}={n}"
        for pool, size in (("trainer", actors), ("rollout", rollouts))
        for key, n in zip(("nnodes", "n_gpus_per_node"), size.split("x"), strict=True)
    ]
    return [*keys, *more]


async def reserve(device: str, *arguments: str) -> tuple[Pool, ...]:
    config = base_config(*overrides(*arguments))
    return await create_pools(pool_specs(config, device), timeout_s=PATIENCE_S)


async def start(device: str, *arguments: str) -> tuple[tuple[Pool, ...], WorkerGroup, WorkerGroup]:
    pools = await reserve(device, *arguments)
    sizes = [pool.spec.nnodes * pool.spec.n_per_node for pool in pools]
    extra = base_config(*OF_THE_CONFIG).ray_init.env_vars
    env = worker_variables({"VLLM_LOGGING_LEVEL": "WARNING"}, os.environ, extra)
    actors = WorkerGroup("actor", [pools[0].spawn(Worker, rank, {}, env=env) for rank in range(sizes[0])])
    of_guests = await environments_of_guests(actors, n_guests=sizes[1], timeout_s=PATIENCE_S)
    rollouts = [pools[1].spawn(Worker, rank, {}, env=env | of_guests[rank]) for rank in range(sizes[1])]
    return pools, actors, WorkerGroup("rollout", rollouts)


async def locations(group: WorkerGroup) -> list[Any]:
    return await group.call(Worker.location, timeout_s=PATIENCE_S, phase="look")


async def diagnose_stopped_worker(actors: WorkerGroup, rollouts: WorkerGroup, rank: int, pid: int) -> dict[str, str]:
    """Stop an actor worker, let a call miss its deadline, and return file name -> stacks of the diagnosis."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await actors.call(Worker.hang_by_intention, timeout_s=1, phase="update")
    except DeadlineError as error:
        with tempfile.TemporaryDirectory() as root:
            folder = await diagnose(error, [actors, rollouts], Path(root), timeout_s=60)
            assert folder is not None
            return {file.name: file.read_text() for file in folder.glob("*.stacks.txt")}
    raise AssertionError(f"actor worker {rank} answered")


async def lose_node(cluster: Cluster, node: Any, rollouts: WorkerGroup) -> dict[str, Any]:
    """Kill a node during a call. Return the worker and the text of the error, and the dead ranks."""
    hanging = asyncio.create_task(rollouts.call(Worker.hang_by_intention, timeout_s=PATIENCE_S, phase="generate"))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    try:
        await hanging
    except WorkerDied as error:
        return {"worker": error.worker, "what": error.what, "dead": await rollouts.dead()}
    raise AssertionError("the call did not fail")


async def score_on(pool: Pool) -> dict[str, Any]:
    """Score six samples with keys, for data-parallel ranks on both nodes. Return the homes and places of their rows."""
    nodes = pool.nodes()
    with tempfile.TemporaryDirectory() as root:
        keys = Path(root) / "keys"
        make_keys(keys)
        sockets = SocketSettings(keys=server_keys(keys))
        sequences = [TeacherSequence(np.arange(5000, dtype=np.int32) % 90, 1)] * 6
        engine = FakeEngine(replace(INFO, max_model_len=5000), capacity_tokens=5000)
        with (
            running_proxy(bind="0.0.0.0", sockets=sockets) as proxy,
            running_worker(proxy.backend_port, engine, auth_dir=keys),
            TeacherClient(ray.util.get_node_ip_address(), proxy.frontend_port, auth_dir=keys) as client,
        ):
            client.hello()
            spec = client.spec()
            (keys / "clients").rename(keys / "moved")  # workers on other nodes have no such folder
            scoring = ScoringPool.start({"a": spec}, nodes, per_node=1, max_restarts=0)
            await scoring.connect(30)
            scoring.homes = Homes(tuple(nodes), (0, 1, 1))
            request = TeacherRequest(teacher="a", step=0, uids=range(6), sequences=sequences)
            scores = await scoring.scores(request, PATIENCE_S)
            places = ray.experimental.get_object_locations([each.block for each in scores])
            await scoring.group.stop(timeout_s=5)
            return {
                "nodes": list(nodes),
                "homes": [each.home for each in scores],
                "places": [places[each.block]["node_ids"] for each in scores],
                "workers": [type(ray.get(each.block)).__name__ for each in scores],  # after the workers have ended
                "secret_is_hidden": "secret" not in repr(spec),
            }


async def scenario(cluster: Cluster, second: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"second": second.node_id}
    try:
        await start("cpu", "3x1", "1x1")
    except ResourceError as error:
        facts["refusal"] = str(error)

    pools, actors, rollouts = await start("cuda", "2x2", "2x2", *HYBRID)
    facts["actors"], facts["rollouts"] = await locations(actors), await locations(rollouts)
    facts["variables"] = await actors.call(Worker.variables, timeout_s=PATIENCE_S, phase="look")
    try:
        await check_nodes(base_config(), "cuda", pools, timeout_s=PATIENCE_S)
    except ResourceError as error:
        facts["node_problems"] = str(error)
    facts["scored"] = await score_on(pools[0])
    stopped, hanging = (rank for rank, (node, _, _) in enumerate(facts["actors"]) if node == second.node_id)
    facts["hanging"], facts["stopped"] = hanging, stopped
    facts["stacks"] = await diagnose_stopped_worker(actors, rollouts, stopped, facts["actors"][stopped][2])
    await actors.stop(timeout_s=5)
    with suppress(TimeoutError):  # on a busy machine the kill may miss its deadline; Ray then ends the process
        await wait_until_async(lambda: not any(is_running(pid) for _, _, pid in facts["actors"]))
    facts["actors_running"] = [pid for _, _, pid in facts["actors"] if is_running(pid)]

    facts["death"] = await lose_node(cluster, second, rollouts)
    await rollouts.stop(timeout_s=5)
    for pool in pools:
        pool.release()
    return facts


def main() -> None:
    node = dict(num_cpus=3, num_gpus=2, object_store_memory=80 << 20)
    cluster = Cluster(initialize_head=True, head_node_args=node | dict(include_dashboard=False))
    try:
        second = cluster.add_node(**node)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            keys = overrides("2x2", "2x1", f"ray_init.address={cluster.address}", "trainer.device=cpu")
            status = check_devices.main(keys)
        os.environ.update(OF_THE_DRIVER)
        ray.init(address=cluster.address, log_to_driver=False)
        facts = asyncio.run(scenario(cluster, second))
        facts |= dict(status=status, output=output.getvalue(), errors=errors.getvalue())
        print(JSON_PREFIX + json.dumps(facts))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
