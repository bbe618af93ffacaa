"""What a diagnosis tells of real workers that hang in every way there is, and of one that is dead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from recipe_gkd.diagnostics import collect, node_agent, stack_dumps
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.errors import DeadlineError, GkdError, ModelError, WorkerDied
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime import process_trees, scratch
from recipe_gkd.runtime.process_id import is_alive, process_id


class Stuck:
    """A worker that can be told to hang."""

    def setup(self) -> int:
        stack_dumps.enable_stack_dumps()
        stack_dumps.allow_stack_dumps()  # again, as a vLLM worker in this process does
        return os.getpid()

    def spin_for_ever(self) -> None:
        while True:
            pass

    def sleep_for_ever(self) -> None:
        time.sleep(1000)

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
time.sleep(1000)
"""
_RECORDER = """
import os
os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "1"
from recipe_gkd.diagnostics import stack_dumps
stack_dumps.enable_stack_dumps()
prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
os.mkfifo(prefix + "3.pipe")
open(prefix + "3.pipe").read(1)
open(prefix + "3", "w").write("dump")
"""
HANGS = ["fine", "spin_for_ever", "sleep_for_ever", "receive_for_ever", "sleep_for_ever", "sleep_for_ever"]
STOPPED, DEAD = 4, 5


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # Ray has not looked at it yet
    except psutil.NoSuchProcess:
        return False


def start(n: int) -> tuple[WorkerGroup, list[int]]:
    group = WorkerGroup("test", [ray.remote(num_cpus=0)(Stuck).remote() for _ in range(n)])
    return group, run(group.call("setup", timeout_s=60, phase="start"))


@pytest.fixture(scope="module")
def hung(ray_session: None) -> Iterator[tuple[WorkerGroup, list[int], GkdError]]:
    """Six workers: one answered, three hang, one is stopped, one is dead; their pids; the error of the deadline."""
    group, pids = start(len(HANGS))
    run(group.call_one(1, "with_child", timeout_s=20, phase="start"))

    async def call_all() -> None:
        calls = {rank: getattr(group.handles[rank], method).remote() for rank, method in enumerate(HANGS)}
        strike = asyncio.get_running_loop().call_later(1, os.kill, pids[STOPPED], signal.SIGSTOP)
        await group._gather(
            {rank: call for rank, call in calls.items() if rank != DEAD}, timeout_s=6, phase="update, 7"
        )
        strike.cancel()

    os.kill(pids[DEAD], signal.SIGKILL)
    with pytest.raises(DeadlineError) as caught:
        run(call_all())
    yield group, pids, caught.value
    run(group.stop(timeout_s=10))


@pytest.fixture(scope="module")
def folder(hung: tuple[WorkerGroup, list[int], GkdError], tmp_path_factory: pytest.TempPathFactory) -> Path:
    group, _, error = hung
    started = time.monotonic()
    folder = run(diagnose(error, [group], tmp_path_factory.mktemp("run")))
    took = time.monotonic() - started
    print(f"diagnosis took {took:.2f} s")
    assert took < 3.2
    assert isinstance(folder, Path)
    return folder


def test_the_report_says_who_answered_and_in_which_state_each_process_is(folder: Path, hung: Any) -> None:
    report = (folder / "report.md").read_text()
    print(report)
    rows = {row.split("|")[1].strip(): row for row in report.splitlines() if row.startswith("| test worker")}
    assert "phase: update, 7" in report and "did not answer within 6 s: test worker 1 of 6, test worker 2" in report
    assert "answered" in rows["test worker 0 of 6"] and "silent" in rows["test worker 1 of 6"]
    assert "running" in rows["test worker 1 of 6"] and "waiting" in rows["test worker 2 of 6"]
    assert "stopped (SIGSTOP?)" in rows["test worker 4 of 6"] and "gone" in rows["test worker 5 of 6"]
    assert str(hung[1][STOPPED]) in rows["test worker 4 of 6"] and "MiB" in rows["test worker 4 of 6"]
    assert folder.name.endswith("-update-7") and folder.parent.name == "diagnosis"


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_stacks_show_where_a_worker_hangs_even_a_stopped_one(folder: Path, rank: int) -> None:
    stacks = (folder / f"test-worker-{rank}.stacks.txt").read_text()
    assert HANGS[rank] in stacks, stacks


def test_stacks_of_children_and_the_ends_of_logs_are_there_too(folder: Path) -> None:
    assert "idle_in_child" in (folder / "test-worker-1.stacks.txt").read_text()
    assert "a line in the worker's log" in (folder / "test-worker-0.log.txt").read_text()


def test_where_py_spy_is_not_allowed_the_process_writes_its_stacks_itself(hung: Any, monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Operation not permitted")

    stranger = subprocess.Popen(["sleep", "60"])  # has no handler for SIGUSR1, and must not be ended by it
    monkeypatch.setattr(node_agent.subprocess, "run", refuse)
    _, pids, _ = hung
    for rank in (1, 2, 3):
        assert HANGS[rank] in node_agent._stacks(pids[rank], frozen=False, deadline=time.monotonic() + 1)
    assert "not permitted" in node_agent._stacks(pids[STOPPED], frozen=True, deadline=time.monotonic() + 1)
    assert "not permitted" in node_agent._stacks(stranger.pid, frozen=False, deadline=time.monotonic() + 1)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_dumps_of_the_nccl_flight_recorder_are_asked_for_by_pipe_and_collected(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Torch's side played by a process that waits on a named pipe as ``ProcessGroupNCCL`` does."""
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", _RECORDER], env=os.environ | {"TMPDIR": str(tmp_path)})
    while not (pipes := list(tmp_path.glob("*/nccl_3.pipe"))):
        time.sleep(0.01)
    time.sleep(0.2)
    assert node_agent.inspect([process.pid], str(tmp_path), 5)[process.pid].nccl_dumps == {"nccl_3": b"dump"}
    ended = process_id(process.pid)
    process.wait(10)  # also of one that has died
    assert node_agent.inspect([process.pid], str(tmp_path), 5)[process.pid].nccl_dumps == {"nccl_3": b"dump"}
    assert ended is not None
    process_trees.end([ended], 0.0, 1.0)
    assert not pipes[0].parent.exists()


def test_dumps_that_do_not_come_hold_up_a_diagnosis_once_and_not_for_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(node_agent, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(node_agent, "run_until", lambda _, looks: [None for _ in looks])
    monkeypatch.setattr(node_agent, "_ask_for_nccl_dumps", lambda pid: {tmp_path / f"nccl_{pid}": 0.0})
    found = node_agent.inspect(range(1, 9), str(tmp_path), 2.0)
    assert len(found) == 8 and clock.now < 2.1


def test_other_errors_need_no_diagnosis_and_a_folder_that_cannot_be_written_is_no_error(
    hung: Any, tmp_path: Path
) -> None:
    group, _, error = hung
    assert run(diagnose(ModelError("no such model"), [group], tmp_path)) is None
    (tmp_path / "file").touch()
    assert run(diagnose(error, [group], tmp_path / "file")) is None


def test_a_diagnosis_that_runs_late_is_shorter_but_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def locate(handles: list[str]) -> list[ActorLocation]:
        if handles == ["slow"]:
            await asyncio.sleep(60)
        return [ActorLocation(0, "", "", False, "")]

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(collect, "locate", locate)
    monkeypatch.setattr(collect, "_write_files", refuse)
    error = DeadlineError("update: actor worker 0 of 1 did not answer")
    error.phase, error.silent, error.waited_s = "update", ["actor worker 0 of 1"], 5.0
    groups = [WorkerGroup("actor", ["quick"]), WorkerGroup("rollout", ["slow"])]
    folder = run(diagnose(error, groups, tmp_path, timeout_s=0.7))
    report = (folder / "report.md").read_text()
    assert "did not answer within 5 s: actor worker 0 of 1" in report and "| actor worker 0 of 1 | silent" in report


def test_dead_tells_a_stopped_worker_from_one_whose_process_is_gone(hung: Any) -> None:
    assert run(hung[0].dead()) == [DEAD]


def test_stop_leaves_no_process_even_of_stopped_workers_and_their_children(ray_session: None) -> None:
    group, pids = start(3)
    child = run(group.call_one(0, "with_child", timeout_s=20, phase="start"))
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(DeadlineError):
        run(group.call("fine", timeout_s=0.5, phase="p"))
    started = time.monotonic()
    run(group.stop(timeout_s=10))
    print(f"stop with a stopped worker took {time.monotonic() - started:.2f} s")
    assert time.monotonic() - started < 8
    assert not any(lives(pid) for pid in [*pids, child])


def test_stop_of_healthy_workers_is_quick(ray_session: None) -> None:
    group, pids = start(2)
    started = time.monotonic()
    run(group.stop(timeout_s=10))
    print(f"stop of healthy workers took {time.monotonic() - started:.2f} s")
    assert time.monotonic() - started < 6
    assert not any(lives(pid) for pid in pids)


def test_a_worker_that_died_is_named_and_replaced(ray_session: None) -> None:
    group, pids = start(2)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"load: test worker 1 of 2 died, on node [0-9.]+ \w{8} \("):
        run(group.call("sleep_for_ever", timeout_s=20, phase="load"))
    assert run(group.dead()) == [1]
    group.replace(1, ray.remote(num_cpus=0)(Stuck).remote())
    assert run(group.dead()) == []
    run(group.call_one(1, "fine", timeout_s=30, phase="again"))
    run(group.stop(timeout_s=5))


def test_processes_are_ended_across_a_step_of_the_clock_and_one_that_got_their_pid_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    known = process_trees.tree([child.pid for child in children])
    monkeypatch.setattr(psutil.Process, "create_time", lambda *_, **__: 0.0)  # what psutil tells after such a step
    other = replace(known[1], start_ticks=known[1].start_ticks - 1)  # the one that had the pid before
    try:
        assert process_trees.end_trees([known[0], other], 5.0) == []
        assert not is_alive(known[0]) and is_alive(known[1])
    finally:
        for child in children:
            child.kill()
            child.wait()
