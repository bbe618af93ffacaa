"""Diagnosis of real workers: one answers, three hang in different ways, one is stopped, one is dead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from recipe_gkd.diagnostics import node_agent, stack_dumps
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.errors import DeadlineError, GkdError, ModelError, WorkerDied
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from tests._support.errors import raises
from tests._support.processes import is_running
from tests._support.waiting import PATIENCE_S


class HangingWorker:
    """A worker with methods that hang."""

    def setup(self) -> int:
        stack_dumps.enable_stack_dumps()
        stack_dumps.allow_stack_dumps()  # A vLLM worker in this process calls it again.
        return os.getpid()

    def spin_for_ever(self) -> None:
        while True:
            pass

    def sleep_for_ever(self) -> None:
        time.sleep(3600)

    def receive_for_ever(self) -> None:
        import socket

        import torch.distributed as dist

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", _SILENT_PEER, str(port)])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
        import torch

        dist.recv(torch.zeros(1), src=1)
        child.wait()

    def with_child(self) -> int:
        self.child = subprocess.Popen(
            [sys.executable, "-c", "def idle_in_child():\n input()\nidle_in_child()"], stdin=-1
        )
        return self.child.pid

    def fine(self) -> None:
        print("a line in the worker's log", flush=True)

    def shutdown(self) -> None:
        pass


_SILENT_PEER = """
import sys, time, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=1, world_size=2)
time.sleep(3600)
"""
HANGS = ["fine", "spin_for_ever", "sleep_for_ever", "receive_for_ever", "sleep_for_ever", "sleep_for_ever"]
STOPPED, DEAD = 4, 5


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def start(n: int) -> tuple[WorkerGroup, list[int]]:
    group = WorkerGroup("test", [ray.remote(num_cpus=0)(HangingWorker).remote() for _ in range(n)])
    return group, run(group.call(HangingWorker.setup, timeout_s=PATIENCE_S, phase="start"))


@pytest.fixture(scope="module")
def hung(ray_session: None) -> Iterator[tuple[WorkerGroup, list[int], GkdError]]:
    """Yield the workers of :data:`HANGS`, their pids, and the error of the missed deadline."""
    group, pids = start(len(HANGS))
    run(group.call_one(1, HangingWorker.with_child, timeout_s=PATIENCE_S, phase="start"))

    async def call_all() -> None:
        calls = {rank: getattr(group.handles[rank], method).remote() for rank, method in enumerate(HANGS)}
        asyncio.get_running_loop().call_later(1, os.kill, pids[STOPPED], signal.SIGSTOP)
        calls.pop(DEAD)
        await group._gather(calls, timeout_s=4, phase="update, 7")

    os.kill(pids[DEAD], signal.SIGKILL)
    with pytest.raises(DeadlineError) as caught:
        run(call_all())
    yield group, pids, caught.value
    run(group.stop(timeout_s=10))


@pytest.fixture(scope="module")
def folder(hung: tuple[WorkerGroup, list[int], GkdError], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the diagnosis."""
    group, _, error = hung
    folder = run(diagnose(error, [group], tmp_path_factory.mktemp("run"), timeout_s=60))
    assert isinstance(folder, Path)
    return folder


class TestDiagnose:
    def test_report_lists_answers_and_process_states(self, folder: Path, hung: Any) -> None:
        report = (folder / "report.md").read_text()
        print(report)
        rows = {row.split("|")[1].strip(): row for row in report.splitlines() if row.startswith("| test worker")}
        assert "phase: update, 7" in report
        assert "did not answer within 4 s: test worker 1 of 6, test worker 2" in report
        assert "answered" in rows["test worker 0 of 6"] and "silent" in rows["test worker 1 of 6"]
        assert "running" in rows["test worker 1 of 6"] and "waiting" in rows["test worker 2 of 6"]
        assert "stopped (SIGSTOP?)" in rows["test worker 4 of 6"] and "gone" in rows["test worker 5 of 6"]
        assert str(hung[1][STOPPED]) in rows["test worker 4 of 6"] and "MiB" in rows["test worker 4 of 6"]
        assert folder.name.endswith("-update-7") and folder.parent.name == "diagnosis"

    @pytest.mark.parametrize("rank", [1, 2, 3, 4])
    def test_stacks_show_the_hanging_function(self, folder: Path, rank: int) -> None:
        stacks = (folder / f"test-worker-{rank}.stacks.txt").read_text()
        assert HANGS[rank] in stacks, stacks

    def test_stacks_of_children_and_log_tails_are_written(self, folder: Path) -> None:
        assert "idle_in_child" in (folder / "test-worker-1.stacks.txt").read_text()
        assert "a line in the worker's log" in (folder / "test-worker-0.log.txt").read_text()

    def test_other_error_or_unwritable_folder_returns_none(self, hung: Any, tmp_path: Path) -> None:
        group, _, error = hung
        assert run(diagnose(ModelError("no such model"), [group], tmp_path)) is None
        (tmp_path / "file").touch()
        assert run(diagnose(error, [group], tmp_path / "file")) is None


class TestStacks:
    def test_without_py_spy_the_process_writes_its_own_stacks(self, hung: Any, monkeypatch: Any) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("Operation not permitted")

        foreign = subprocess.Popen(["sleep", "3600"])  # It has no handler of SIGUSR1, which would end it.
        monkeypatch.setattr(node_agent.subprocess, "run", refuse)
        _, pids, _ = hung
        for rank in (1, 2, 3):
            assert HANGS[rank] in node_agent._stacks(pids[rank], frozen=False, deadline=time.monotonic() + 1)
        assert "not permitted" in node_agent._stacks(pids[STOPPED], frozen=True, deadline=time.monotonic() + 1)
        assert "not permitted" in node_agent._stacks(foreign.pid, frozen=False, deadline=time.monotonic() + 1)
        assert foreign.poll() is None
        foreign.kill()
        foreign.wait()


class TestWorkerGroup:
    def test_dead_excludes_stopped_workers(self, hung: Any) -> None:
        assert run(hung[0].dead()) == [DEAD]

    def test_stop_kills_stopped_workers_and_their_children(self, ray_session: None) -> None:
        group, pids = start(3)
        child = run(group.call_one(0, HangingWorker.with_child, timeout_s=PATIENCE_S, phase="start"))
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(DeadlineError):
            run(group.call(HangingWorker.fine, timeout_s=0.5, phase="p"))
        run(group.stop(timeout_s=10))
        assert not any(is_running(pid) for pid in [*pids, child])

    def test_stop_ends_healthy_workers(self, ray_session: None) -> None:
        group, pids = start(2)
        run(group.stop(timeout_s=10))
        assert not any(is_running(pid) for pid in pids)

    def test_killed_worker_is_named_and_replaced(self, ray_session: None) -> None:
        group, pids = start(2)
        os.kill(pids[1], signal.SIGKILL)
        with raises(WorkerDied, phase="load", worker="test worker 1 of 2"):
            run(group.call(HangingWorker.sleep_for_ever, timeout_s=PATIENCE_S, phase="load"))
        assert run(group.dead()) == [1]
        group.replace(1, ray.remote(num_cpus=0)(HangingWorker).remote())
        assert run(group.dead()) == []
        run(group.call_one(1, HangingWorker.fine, timeout_s=PATIENCE_S, phase="again"))
        run(group.stop(timeout_s=5))
