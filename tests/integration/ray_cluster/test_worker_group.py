from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest
import ray

from recipe_gkd.errors import DeadlineError, ModelError, WorkerDied, WorkerError
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from tests._support.errors import raises
from tests._support.waiting import PATIENCE_S

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
            raise ModelError("no such model", remedy="give another")
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
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def wait_for_end_of_counting(group: WorkerGroup, rank: int) -> None:
    """A generator that is canceled while it yields an item ends when Python finalizes it, after the call has ended."""
    while await group.call_one(rank, Worker.is_counting, timeout_s=PATIENCE_S, phase="look"):
        await asyncio.sleep(0.05)


def start(n: int) -> WorkerGroup:
    group = WorkerGroup("test", [ray.remote(num_cpus=0)(Worker).remote() for _ in range(n)])
    run(group.call(Worker.echo, 0, timeout_s=PATIENCE_S, phase="start"))
    return group


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    group = start(3)
    yield group
    run(group.stop(timeout_s=5))


class TestCall:
    def test_results_are_in_rank_order(self, group: WorkerGroup) -> None:
        assert run(group.call(Worker.echo, 7, timeout_s=PATIENCE_S, phase="p")) == [7, 7, 7]
        assert run(group.call_each(Worker.echo, [(1,), (2,), (3,)], timeout_s=PATIENCE_S, phase="p")) == [1, 2, 3]
        assert run(group.call_one(1, Worker.echo, 5, timeout_s=PATIENCE_S, phase="p")) == 5

    def test_missed_deadline_names_silent_and_answering_workers(self, group: WorkerGroup) -> None:
        silent, answered = ("test worker 1 of 3",), ("test worker 0 of 3", "test worker 2 of 3")
        with raises(DeadlineError, phase="update", silent=silent, answered=answered, waited_s=0.5):
            run(group.call_each(Worker.wait, [(0,), (60,), (0,)], timeout_s=0.5, phase="update"))

    def test_failure_is_raised_before_other_workers_end(self, group: WorkerGroup) -> None:
        arguments = [(60, "never"), (60, "never"), (0, "any")]
        with raises(WorkerError, phase="save", worker="test worker 2 of 3") as caught:
            run(group.call_each(Worker.fail_after, arguments, timeout_s=PATIENCE_S, phase="save"))
        assert isinstance(caught.value.__cause__, ray.exceptions.RayTaskError)

    def test_own_error_keeps_class_and_message(self, group: WorkerGroup) -> None:
        fields = dict(what="no such model", remedy="give another", phase="load", worker="test worker 0 of 3")
        with raises(ModelError, **fields):
            run(group.call(Worker.fail_after, 0, "own", timeout_s=PATIENCE_S, phase="load"))

    def test_own_error_of_another_worker_is_raised_instead_of_a_death(self) -> None:
        group = start(3)
        with pytest.raises(ModelError):
            run(
                group.call_each(
                    Worker.fail_after, [[0, "die"], [0.2, "own"], [0, "never"]], timeout_s=PATIENCE_S, phase="update"
                )
            )
        with raises(WorkerDied, phase="update", worker="test worker 0 of 3"):
            run(group.call_one(0, Worker.echo, 1, timeout_s=PATIENCE_S, phase="update"))
        run(group.stop(timeout_s=5))


class TestStream:
    def test_items_arrive_in_order_and_the_ended_stream_is_not_canceled(
        self, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        canceled: list[Any] = []
        monkeypatch.setattr(ray, "cancel", canceled.append)

        async def collect() -> list[int]:
            return [i async for i in group.stream(1, Worker.count, 3, 0.01, timeout_s=PATIENCE_S, phase="generate")]

        assert run(collect()) == [0, 1, 2] and not canceled

    @pytest.mark.parametrize(
        ("args", "timeout_s", "error", "fields"),
        [
            ((0, 0.0), 20, WorkerError, {"worker": "test worker 1 of 3"}),
            ((5, 30.0), 0.5, DeadlineError, {"silent": ("test worker 1 of 3",), "waited_s": 0.5}),
        ],
        ids=["failure", "deadline"],
    )
    def test_failure_or_deadline_names_the_worker(
        self, group: WorkerGroup, args: Any, timeout_s: float, error: type, fields: dict[str, Any]
    ) -> None:
        async def collect() -> None:
            async for _ in group.stream(1, Worker.count, *args, timeout_s=timeout_s, phase="generate"):
                pass

        with raises(error, phase="generate", **fields):
            run(collect())

    def test_closed_early_ends_the_generator_on_the_worker(self, group: WorkerGroup) -> None:
        async def take_one() -> None:
            stream = group.stream(0, Worker.count_for_ever, timeout_s=PATIENCE_S, phase="generate")
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        run(take_one())
        run(wait_for_end_of_counting(group, 0))

    def test_canceled_twice_leaves_no_unretrieved_exception(self, group: WorkerGroup) -> None:
        """Asyncio would print a traceback after the error of the run."""
        reported: list[dict[str, Any]] = []

        async def scenario() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

            async def consume() -> None:
                async for _ in group.stream(2, Worker.count_for_ever, timeout_s=PATIENCE_S, phase="generate"):
                    pass

            consumer = asyncio.ensure_future(consume())
            await asyncio.sleep(0.3)
            consumer.cancel()
            await asyncio.sleep(0.01)  # The consumer is closing the stream now.
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            await wait_for_end_of_counting(group, 2)
            await asyncio.sleep(0.3)
            gc.collect()

        run(scenario())
        assert reported == []


@pytest.mark.slow
def test_worker_killed_by_the_memory_monitor_is_dead_with_the_reason() -> None:
    """The memory threshold belongs to a cluster. At 1 % of the memory, the monitor kills any worker."""
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
        async for _ in group.stream(0, Worker.count, timeout_s=60, phase="generate"):
            pass
    except WorkerDied as error:
        print("died:", error, await group.dead())

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "died: generate: rollout worker 0 of 1: its process died" in done.stdout, done.stdout + done.stderr
    assert "memory" in done.stdout and "[0]" in done.stdout


class TestStop:
    def test_busy_workers_are_killed(self) -> None:
        group = start(2)
        run(group.stop(timeout_s=0.1))
        with pytest.raises(WorkerDied):
            run(group.call(Worker.echo, 0, timeout_s=PATIENCE_S, phase="after"))
