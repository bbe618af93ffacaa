"""Sleep and wake-up of the teachers' services by a run."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from recipe_gkd.config import Config
from recipe_gkd.teachers.router import open_teachers
from recipe_gkd.teachers.routes import Routes
from teacher import TeacherClient, TeacherError, TeacherTimeout, TeacherUnavailable
from teacher.proxy import Proxy
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.fake_teachers import OffsetEngine, is_scored_by, pair
from tests._support.fake_worker import running_worker
from tests._support.teacher_service import running_proxy

TEACHER = "actor_rollout_ref.teacher"
BOTH = Routes(("one", "two"))


def configured(proxies: list[Proxy], *overrides: str) -> Config:
    teachers = [
        f"{TEACHER}.teachers.{name}=127.0.0.1:{proxy.frontend_port}"
        for name, proxy in zip(BOTH.names, proxies, strict=True)
    ]
    keys = [f"{TEACHER}.{override}" for override in overrides]
    return base_config("actor_rollout_ref.rollout.n=2", *teachers, f"{TEACHER}.route_key=teacher", *keys)


def routes() -> Routes:
    return Routes(BOTH.names, np.array([0, 1]))


def test_sleep_and_wake_call_each_service_once_and_at_the_same_time() -> None:
    with (
        running_proxy() as one,
        running_proxy() as two,
        running_worker(one.backend_port, OffsetEngine(0)) as of_one,
        running_worker(two.backend_port, OffsetEngine(50)) as of_two,
        open_teachers(configured([one, two]), routes()) as teachers,
    ):

        async def step() -> None:
            of_one.engine.sleep_gate.clear()
            asleep = asyncio.create_task(teachers.sleep())
            async with asyncio.timeout(10):
                while not of_two.engine.is_asleep:  # it does not wait for the first service
                    await asyncio.sleep(0.01)
            of_one.engine.sleep_gate.set()
            await asleep
            assert of_one.engine.is_asleep
            await teachers.wake()
            first, second = await teachers.score([pair(0), pair(2)], step=0)
            assert is_scored_by(0, first) and is_scored_by(50, second)

        asyncio.run(step())


def test_services_with_one_address_get_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    submit_sleep, calls = TeacherClient.submit_sleep, list[str]()

    def count(client: TeacherClient, timeout_s: float | None = None) -> Future[int]:
        calls.append(client.address)
        return submit_sleep(client, timeout_s)

    monkeypatch.setattr(TeacherClient, "submit_sleep", count)
    with (
        running_proxy() as proxy,
        running_worker(proxy.backend_port, OffsetEngine(0)),
        open_teachers(configured([proxy, proxy]), routes()) as teachers,
    ):
        asyncio.run(teachers.sleep())
        assert len(teachers.clients) == 2 and len(calls) == 1
        asyncio.run(teachers.wake())


def test_wake_failure_names_address_and_worker_of_each_service() -> None:
    with (
        running_proxy() as one,
        running_proxy() as two,
        running_worker(one.backend_port, OffsetEngine(0)) as of_one,
        running_worker(two.backend_port, OffsetEngine(50)) as of_two,
        open_teachers(configured([one, two], "timeout_s=2"), routes()) as teachers,
    ):
        asyncio.run(teachers.sleep())
        for worker in (of_one, of_two):
            worker.engine.wake_error = TeacherError("the weights are not the same")
        with raises(TeacherUnavailable, operation="wake-up", address=f"tcp://127.0.0.1:{one.frontend_port}") as failed:
            asyncio.run(teachers.wake())
        assert len(failed.value.workers) == 1
        assert any(f"127.0.0.1:{two.frontend_port}" in line for line in failed.value.details)


def test_wake_goes_on_without_a_worker_that_fails() -> None:
    with (
        running_proxy() as proxy,
        running_worker(proxy.backend_port, OffsetEngine(0)) as broken,
        running_worker(proxy.backend_port, OffsetEngine(0)),
        open_teachers(configured([proxy, proxy]), routes()) as teachers,
    ):
        asyncio.run(teachers.sleep())
        broken.engine.wake_error = TeacherError("the weights are not the same")
        asyncio.run(teachers.wake())
        (sample,) = asyncio.run(teachers.score([pair(0)], step=0))
        assert is_scored_by(0, sample)


def test_sleep_deadline_is_that_of_requests() -> None:
    with (
        running_proxy() as proxy,
        running_worker(proxy.backend_port, OffsetEngine(0)) as worker,
        open_teachers(configured([proxy, proxy], "timeout_s=1"), routes()) as teachers,
    ):
        worker.engine.sleep_gate.clear()
        with raises(TeacherTimeout, stage="changing", address=f"tcp://127.0.0.1:{proxy.frontend_port}"):
            asyncio.run(teachers.sleep())
        worker.engine.sleep_gate.set()


def test_on_failure_wait_scores_after_wake_up_by_another_client() -> None:
    with (
        running_proxy() as proxy,
        running_worker(proxy.backend_port, OffsetEngine(0)),
        TeacherClient(server_port=proxy.frontend_port) as other,
        open_teachers(configured([proxy, proxy], "on_failure=wait"), routes()) as teachers,
    ):

        async def step() -> None:
            await teachers.sleep()
            scored = asyncio.create_task(teachers.score([pair(0)], step=0))
            await asyncio.sleep(0.1)
            assert not scored.done()
            await asyncio.wrap_future(other.submit_wake(10))
            (sample,) = await scored
            assert is_scored_by(0, sample)

        asyncio.run(step())
