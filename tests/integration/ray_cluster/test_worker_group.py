"""Calling a group of real Ray workers: order, streams, deadlines, and who is blamed."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from recipe_gkd.errors import DeadlineError, GkdError, ModelError, WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.ray_cluster import worker_group
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from recipe_gkd.ray_cluster.worker_group import WorkerGroup

pytestmark = pytest.mark.usefixtures("ray_session")


class Worker:
    counting = False

    async def echo(self, value: Any) -> Any:
        return value

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def fail_after(self, seconds: float, kind: str) -> None:
        await asyncio.sleep(seconds)
        if kind == "own":
            raise ModelError("no such model; give another")
        if kind == "die":
            os._exit(3)
        if kind != "never":
            raise ZeroDivisionError("one over nothing")

    async def count(self, n: int, seconds: float) -> AsyncIterator[int]:
        for i in range(n):
            await asyncio.sleep(seconds)
            yield i
        if n == 0:
            raise ZeroDivisionError("one over nothing")

    async def count_for_ever(self) -> AsyncIterator[int]:
        self.counting = True
        try:
            while True:
                await asyncio.sleep(0.01)
                yield 1
        finally:
            self.counting = False

    async def is_counting(self) -> bool:
        return self.counting

    async def shutdown(self) -> None:
        pass


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def start(n: int) -> WorkerGroup:
    group = WorkerGroup("test", [ray.remote(num_cpus=0)(Worker).remote() for _ in range(n)])
    run(group.call("echo", 0, timeout_s=60, phase="start"))
    return group


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    group = start(3)
    yield group
    run(group.stop(timeout_s=5))


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert run(group.call("echo", 7, timeout_s=20, phase="p")) == [7, 7, 7]
    assert run(group.call_each("echo", [[1], [2], [3]], timeout_s=20, phase="p")) == [1, 2, 3]
    assert run(group.call_one(1, "echo", 5, timeout_s=20, phase="p")) == 5


def test_a_deadline_names_who_did_not_answer_and_who_did(group: WorkerGroup) -> None:
    with pytest.raises(
        DeadlineError, match=r"update: test worker 1 of 3 did not answer within 2 s \(.*worker 0 .*worker 2"
    ):
        run(group.call_each("wait", [[0], [60], [0]], timeout_s=2, phase="update"))


def test_a_failure_ends_the_call_at_once_and_names_worker_and_phase(group: WorkerGroup) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match="save: test worker 2 of 3 failed: ZeroDivisionError: one over nothing"):
        run(group.call_each("fail_after", [[60, "never"], [60, "never"], [0, "any"]], timeout_s=50, phase="save"))
    assert time.monotonic() - started < 20


def test_a_workers_own_error_keeps_its_class_and_message(group: WorkerGroup) -> None:
    with pytest.raises(ModelError, match=r"^load: test worker 0 of 3: no such model; give another$"):
        run(group.call("fail_after", 0, "own", timeout_s=20, phase="load"))


def test_an_error_that_tells_of_worker_12_is_still_given_the_name_of_worker_1_who_raised_it() -> None:
    group = WorkerGroup("test", [None] * 13)
    told = [run(group._to_worker_error(rank, "", "load", WeightSyncError("test worker 12 did not come"))) for rank in (1, 12)]
    assert [str(error) for error in told] == [
        "load: test worker 1 of 13: test worker 12 did not come",
        "test worker 12 did not come",
    ]


def test_a_death_is_told_as_such_unless_another_worker_knows_more() -> None:
    group = start(3)
    with pytest.raises(ModelError):
        run(group.call_each("fail_after", [[0, "die"], [0.2, "own"], [0, "never"]], timeout_s=20, phase="update"))
    with pytest.raises(WorkerError, match="update: test worker 0 of 3 died"):
        run(group.call_one(0, "echo", 1, timeout_s=20, phase="update"))
    run(group.stop(timeout_s=5))


def test_a_stream_gives_what_one_worker_yields_as_it_comes(group: WorkerGroup) -> None:
    async def collect() -> list[int]:
        return [i async for i in group.stream(1, "count", 3, 0.01, timeout_s=20, phase="generate")]

    assert run(collect()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ((0, 0.0), WorkerError, "generate: test worker 1 of 3 failed: ZeroDivisionError"),
        ((5, 30.0), DeadlineError, "generate: test worker 1 of 3 did not answer within 3 s"),
    ],
)
def test_a_stream_that_breaks_or_stalls_is_told(group: WorkerGroup, args: Any, error: type, says: str) -> None:
    async def collect() -> None:
        async for _ in group.stream(1, "count", *args, timeout_s=3, phase="generate"):
            pass

    with pytest.raises(error, match=says):
        run(collect())


def test_a_stream_that_is_left_early_ends_on_the_worker_too(group: WorkerGroup) -> None:
    async def take_one() -> None:
        stream = group.stream(0, "count_for_ever", timeout_s=20, phase="generate")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    run(take_one())
    assert run(group.call("is_counting", timeout_s=20, phase="ask"))[0] is False


def test_a_stream_that_is_canceled_twice_leaves_no_exception_that_nobody_retrieves(group: WorkerGroup) -> None:
    """Asyncio would print a traceback of Ray after the error of the run: as of a reward function that fails."""
    reported: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        async def consume() -> None:
            async for _ in group.stream(2, "count_for_ever", timeout_s=20, phase="generate"):
                pass

        consumer = asyncio.ensure_future(consume())
        await asyncio.sleep(0.3)
        consumer.cancel()
        await asyncio.sleep(0.01)  # it is closing the stream
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        while (await group.call_one(2, "is_counting", timeout_s=20, phase="look")) is True:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        gc.collect()

    run(scenario())
    assert reported == []


class Unreachable:
    """A handle whose calls fail as Ray's do, with ``error``."""

    class _actor_id:
        @staticmethod
        def hex() -> str:
            return "ab" * 16

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Any:
        return self

    def options(self, **_: Any) -> Unreachable:
        return self

    def remote(self, *_: Any) -> Any:
        return self

    def completed(self) -> Unreachable:
        return self

    async def __anext__(self) -> Any:
        raise self._error

    def __await__(self) -> Any:
        raise self._error
        yield


def errors_of(error: Exception) -> list[GkdError]:
    """Return the errors that a call and a stream raise."""

    async def stream(group: WorkerGroup) -> None:
        async for _ in group.stream(0, "generate", timeout_s=5, phase="generate"):
            pass

    raised: list[GkdError] = []
    for way in (stream, lambda group: group.call("update", timeout_s=5, phase="update")):
        group = WorkerGroup("rollout", [Unreachable(error)])
        with pytest.raises(GkdError) as caught:
            run(way(group))
        raised.append(caught.value)
        if isinstance(caught.value, WorkerDied):
            assert run(group.dead()) == [0]
    return raised


MEMORY = (
    "Task was killed due to the node running low on memory.\nMemory on the node was 30 GB / 31 GB. Refer to the docs."
)


@pytest.mark.parametrize(
    ("error", "dead", "expected", "says"),
    [
        (ray.exceptions.OutOfMemoryError(MEMORY), False, WorkerDied, "low on memory. Memory on the node was 30 GB"),
        (ray.exceptions.NodeDiedError("the node is gone"), True, WorkerDied, "the node is gone"),
        (ray.exceptions.ObjectLostError("00" * 28, None, ""), False, WorkerError, "ObjectLostError"),
        (ray.exceptions.WorkerCrashedError(), True, WorkerDied, "died"),
    ],
)
def test_whatever_ray_raises_of_a_dead_process_is_a_death_and_the_rest_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, dead: bool, expected: type, says: str
) -> None:
    async def locate(handles: Any) -> list[ActorLocation]:
        return [ActorLocation(1, "node", "10.0.0.1", dead, "")] * len(handles)

    monkeypatch.setattr(worker_group, "locate", locate)
    monkeypatch.setattr(worker_group.ray, "cancel", lambda _: None)
    for raised in errors_of(error):
        assert type(raised) is expected and says in str(raised) and "rollout worker 0 of 1" in str(raised)


def test_failure_of_a_replaced_worker_does_not_count_as_the_death_of_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def locate(handles: Any) -> list[ActorLocation]:
        return [ActorLocation(1, "node", "10.0.0.1", False, "")] * len(handles)

    monkeypatch.setattr(worker_group, "locate", locate)
    monkeypatch.setattr(worker_group.ray, "kill", lambda *_, **__: None)
    successor: Any = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "cd" * 16))
    group = WorkerGroup("rollout", [None])

    class Replaced(Unreachable):
        def __await__(self) -> Any:
            group.replace(0, successor)
            raise self._error
            yield

    group.handles = [Replaced(WorkerDied("rollout worker 0: the rollout engine failed"))]
    with pytest.raises(WorkerDied):
        run(group.call("update", timeout_s=5, phase="update"))
    assert group.handles == [successor] and run(group.dead()) == []


@pytest.mark.slow
def test_a_worker_that_rays_memory_monitor_kills_is_dead_and_the_error_tells_why() -> None:
    """In a process of its own, as the threshold belongs to a cluster: 1 % of the memory, which is in use anyway."""
    program = """
import asyncio, sys
import ray
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.errors import WorkerDied
settings = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 500}
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config=settings)

class Worker:
    async def count(self):
        while True:
            await asyncio.sleep(0.05)
            yield 1

async def main():
    group = WorkerGroup("rollout", [ray.remote(num_cpus=0)(Worker).remote()])
    try:
        async for _ in group.stream(0, "count", timeout_s=60, phase="generate"):
            pass
    except WorkerDied as error:
        print("died:", error, await group.dead())

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "died: generate: rollout worker 0 of 1 died" in done.stdout, done.stdout + done.stderr
    assert "memory" in done.stdout and "[0]" in done.stdout


def test_stop_ends_the_processes_even_of_workers_that_are_stuck() -> None:
    group = start(2)
    run(group.stop(timeout_s=0.1))
    with pytest.raises(WorkerError, match="died"):
        run(group.call("echo", 0, timeout_s=20, phase="after"))
