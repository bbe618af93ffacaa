"""Errors of a worker group whose handles fail like Ray's, without a Ray process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from recipe_gkd.errors import GkdError, ModelError, SecondaryFailure, WorkerDied, WorkerError
from recipe_gkd.ray_cluster import worker_group
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from recipe_gkd.ray_cluster.worker_errors import root_cause
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime.out_of_memory import advice
from tests._support.errors import raises

OUT_OF_MEMORY = (
    "Task was killed due to the node running low on memory.\nMemory on the node was 30 GB / 31 GB. Refer to the docs."
)


class Worker:
    """Methods of the workers; the handles do not call them."""

    def update(self) -> None: ...

    async def generate(self) -> AsyncIterator[None]:
        yield None


class FailingHandle:
    """A handle whose calls fail with ``error``."""

    class _actor_id:
        @staticmethod
        def hex() -> str:
            return "ab" * 16

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Any:
        return self

    def options(self, **_: Any) -> FailingHandle:
        return self

    def remote(self, *_: Any) -> Any:
        return self

    def completed(self) -> FailingHandle:
        return self

    async def __anext__(self) -> Any:
        raise self._error

    def __await__(self) -> Any:
        raise self._error
        yield


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def raised_errors(error: Exception) -> list[GkdError]:
    """Return the errors that a call and a stream raise."""

    async def stream(group: WorkerGroup) -> None:
        async for _ in group.stream(0, Worker.generate, timeout_s=5, phase="generate"):
            pass

    raised: list[GkdError] = []
    for use in (stream, lambda group: group.call(Worker.update, timeout_s=5, phase="update")):
        group = WorkerGroup("rollout", [FailingHandle(error)])
        with pytest.raises(GkdError) as caught:
            run(use(group))
        raised.append(caught.value)
        if isinstance(caught.value, WorkerDied):
            assert run(group.dead()) == [0]
    return raised


class TestWorkerGroup:
    @pytest.mark.parametrize(
        ("error", "dead", "expected", "reason"),
        [
            (ray.exceptions.OutOfMemoryError(OUT_OF_MEMORY), False, WorkerDied, "Memory on the node was 30 GB"),
            (ray.exceptions.NodeDiedError("the node is gone"), True, WorkerDied, "the node is gone"),
            (ray.exceptions.ObjectLostError("00" * 28, None, ""), False, WorkerError, "ObjectLostError"),
            (ray.exceptions.WorkerCrashedError(), True, WorkerDied, ""),
        ],
    )
    def test_ray_error_of_a_dead_process_is_a_death_and_others_are_failures(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, dead: bool, expected: type, reason: str
    ) -> None:
        async def locate(handles: Any) -> list[ActorLocation]:
            return [ActorLocation(1, "node", "10.0.0.1", dead, "")] * len(handles)

        monkeypatch.setattr(worker_group, "locate", locate)
        monkeypatch.setattr(worker_group.ray, "cancel", lambda _: None)
        for raised in raised_errors(error):
            assert type(raised) is expected and raised.worker == "rollout worker 0 of 1"
            assert reason in raised.what  # Ray's own text

    def test_late_failure_of_a_replaced_worker_is_no_death_of_its_successor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def locate(handles: Any) -> list[ActorLocation]:
            return [ActorLocation(1, "node", "10.0.0.1", False, "")] * len(handles)

        monkeypatch.setattr(worker_group, "locate", locate)
        monkeypatch.setattr(worker_group.ray, "kill", lambda *_, **__: None)
        successor: Any = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "cd" * 16))
        group = WorkerGroup("rollout", [None])

        class Replaced(FailingHandle):
            def __await__(self) -> Any:
                group.replace(0, successor)
                raise self._error
                yield

        group.handles = [Replaced(WorkerDied("rollout worker 0: the rollout engine failed"))]
        with pytest.raises(WorkerDied):
            run(group.call(Worker.update, timeout_s=5, phase="update"))
        assert group.handles == [successor] and run(group.dead()) == []


class TestDeviceMemory:
    @pytest.mark.parametrize(
        ("pool", "phase", "kind"), [("actor", "update, step 3", "update"), ("rollout", "generate, step 3", "generate")]
    )
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            torch.AcceleratorError("CUDA error: out of memory"),
        ],
        ids=["torch", "cuda"],
    )
    def test_torch_out_of_memory_has_worker_and_advice(
        self, pool: str, phase: str, kind: Any, error: Exception
    ) -> None:
        group = WorkerGroup(pool, [FailingHandle(error)])
        with raises(WorkerError, phase=phase, worker=f"{pool} worker 0 of 1", details=(advice(pool, kind),)):
            run(group.call(Worker.update, timeout_s=5, phase=phase))

    def test_other_errors_get_no_advice_about_memory(self) -> None:
        group = WorkerGroup("actor", [FailingHandle(RuntimeError("out of memory, says the user's code"))])
        with raises(WorkerError, details=()):
            run(group.call(Worker.update, timeout_s=5, phase="update"))


class TestRootCause:
    def test_own_error_precedes_death_and_death_precedes_secondary_failure(self) -> None:
        own, death = ModelError("no such model"), ray.exceptions.ActorDiedError()
        secondary, foreign = SecondaryFailure("broken collective"), RuntimeError("connection reset")
        assert root_cause({0: secondary, 1: foreign, 2: death, 3: own}) == (3, own)
        assert root_cause({0: secondary, 1: foreign, 2: death}) == (2, death)
        assert root_cause({0: secondary, 1: foreign}) == (0, secondary)
        memory = torch.OutOfMemoryError("CUDA out of memory")
        assert root_cause({0: secondary, 1: own, 2: death, 3: memory}) == (3, memory)
