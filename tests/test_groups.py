"""Calling a group of real Ray workers: order, streams, deadlines, and who is blamed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest
import ray

from recipe_gkd.errors import DeadlineError, ModelError, WeightSyncError, WorkerError
from recipe_gkd.groups import WorkerGroup

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
    told = [run(group._blame(rank, "load", WeightSyncError("test worker 12 did not come"))) for rank in (1, 12)]
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


def test_stop_ends_the_processes_even_of_workers_that_are_stuck() -> None:
    group = start(2)
    run(group.stop(timeout_s=0.1))
    with pytest.raises(WorkerError, match="died"):
        run(group.call("echo", 0, timeout_s=20, phase="after"))
