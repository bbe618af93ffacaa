from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import ray
import ray.cloudpickle

from recipe_gkd.errors import WorkerDied
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from tests._support.errors import raises
from tests._support.processes import is_running
from tests._support.waiting import PATIENCE_S


class Parent:
    """A worker whose child has its own session, so that the end of the worker does not end the child."""

    def setup(self) -> None:
        self.child = subprocess.Popen(["sleep", "3600"], start_new_session=True)

    def pids(self) -> tuple[int, int]:
        return os.getpid(), self.child.pid

    def shutdown(self) -> None:
        pass


def test_children_of_a_killed_worker_end_before_its_successor_starts(ray_session: None) -> None:
    """Without a restart left, they end with the run."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    running_at_start: list[bool] = []
    children: list[int] = []

    def start(rank: int) -> Any:
        running_at_start.extend(map(is_running, children))
        return ray.remote(num_cpus=0)(Parent).remote()

    async def kill_parent(group: WorkerGroup) -> int:
        """Kill the worker and return its child, which still runs."""
        pid, child = await group.call_one(0, Parent.pids, timeout_s=PATIENCE_S, phase="look")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await group.call(Parent.pids, timeout_s=PATIENCE_S, phase="look")
        assert is_running(child)
        children.append(child)
        return int(child)

    async def scenario() -> None:
        group = WorkerGroup("rollout", [start(0)])
        restarts = RolloutRestarts(group, start, allowed=1, timeout_s=PATIENCE_S)
        await group.call(Parent.setup, timeout_s=PATIENCE_S, phase="start")
        await restarts.record_processes([0])
        await kill_parent(group)
        await restarts.replace_dead()
        assert running_at_start == [False]
        child = await kill_parent(group)
        with raises(WorkerDied, worker="rollout worker 0 of 1"):
            await restarts.replace_dead()
        assert not is_running(child)
        await group.stop(timeout_s=5)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


class SlowParent(Parent):
    """A worker whose set-up takes too long, and has started its child before."""

    async def setup(self) -> None:  # type: ignore[override]
        super().setup()
        await asyncio.sleep(3600)

    async def pids(self) -> tuple[int, int]:  # type: ignore[override]
        while not hasattr(self, "child"):
            await asyncio.sleep(0.01)
        return super().pids()


def test_worker_whose_replacement_was_canceled_is_replaced_again_with_its_processes(ray_session: None) -> None:
    """Another error may end the training loop meanwhile, which then begins again."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    classes = iter([Parent, SlowParent, Parent])

    def start(rank: int) -> Any:
        return ray.remote(num_cpus=0)(next(classes)).remote()

    async def scenario() -> None:
        group = WorkerGroup("rollout", [start(0)])
        restarts = RolloutRestarts(group, start, allowed=1, timeout_s=PATIENCE_S)
        await group.call(Parent.setup, timeout_s=PATIENCE_S, phase="start")
        await restarts.record_processes([0])
        first = group.handles[0]
        ray.kill(first)
        replacing = asyncio.ensure_future(restarts.replace_dead(WorkerDied("killed")))
        while group.handles[0] is first:
            await asyncio.sleep(0.01)
        interrupted = await group.call_one(0, Parent.pids, timeout_s=PATIENCE_S, phase="look")
        replacing.cancel()
        await asyncio.wait([replacing])
        await restarts.replace_dead()
        assert restarts.n_restarts == 1 and not any(map(is_running, interrupted))
        assert all(map(is_running, (await group.call(Parent.pids, timeout_s=PATIENCE_S, phase="look"))[0]))
        await restarts.kill_orphans()
        await group.stop(timeout_s=5)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
