"""OutageMonitor: one warning per outage, while requests wait."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recipe_gkd.teachers import outages
from recipe_gkd.teachers.router import open_teachers
from teacher.client import TeacherClient
from teacher.errors import TeacherTimeout, TeacherUnavailable
from teacher.records import TeacherSequence
from teacher.status import ServiceStatus
from tests._support.fake_teachers import OffsetEngine, is_scored_by, pair, service, worker_of
from tests._support.ports import free_port
from tests._support.teacher_service import running_proxy
from tests._support.teacher_status import STATUS
from tests._support.waiting import wait_until_async
from tests.unit.teachers.test_router import ROUTES, configured

SEQUENCE = TeacherSequence(np.zeros(2, np.int32), 1)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(outages, "FIRST_CHECK_S", 0.05)
    monkeypatch.setattr(outages, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(outages, "STATUS_TIMEOUT_S", 2.0)  # long enough to connect on a loaded machine
    caplog.set_level(logging.WARNING, "recipe_gkd")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "recipe_gkd.teachers.outages"]


def test_outage_without_workers_is_reported_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        requests = [asyncio.create_task(teachers.score([pair(uid)], step=0)) for uid in (0, 1)]
        await wait_until_async(lambda: len(warnings(caplog)) > 0)
        await asyncio.sleep(0.5)  # ten more checks
        assert len(warnings(caplog)) == 1
        with worker_of(proxy, 0):
            for request in requests:
                assert is_scored_by(0, (await request)[0])
        await wait_until_async(lambda: len(warnings(caplog)) == 2)
        again = asyncio.create_task(teachers.score([pair(2)], step=1))
        await wait_until_async(lambda: len(warnings(caplog)) == 3)
        again.cancel()

    with running_proxy() as proxy:
        config = configured(f"server_port={proxy.frontend_port}", "timeout_s=99")
        with open_teachers(config, ROUTES) as teachers:
            asyncio.run(run())
    no_worker, again, gone = warnings(caplog)
    assert no_worker.startswith(f"teacher default at tcp://127.0.0.1:{proxy.frontend_port} has no worker (last")
    assert "add one with teacher/join_server.sh" in no_worker
    assert "at most actor_rollout_ref.teacher.timeout_s=99 seconds, then on_failure=fail applies" in no_worker
    assert " again, after " in again and "has no worker (last removal: left: stopped)" in gone


def test_outage_unreachable_service_is_reported_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    async def run() -> None:
        request = asyncio.create_task(teachers.score([pair(0)], step=0))
        await wait_until_async(lambda: len(warnings(caplog)) > 0)
        with service(0, port):
            assert is_scored_by(0, (await request)[0])

    with open_teachers(configured(f"server_port={port}", "on_failure=wait"), ROUTES) as teachers:
        asyncio.run(run())
    unreachable, back = warnings(caplog)
    assert f"cannot be reached: status: no teacher service at tcp://127.0.0.1:{port}; start it with" in unreachable
    assert "max_wait_s=3600 seconds, then on_failure=wait" in unreachable and " again, after " in back


def test_outage_slow_service_is_not_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[float] = []
    submit_status = TeacherClient.submit_status
    monkeypatch.setattr(
        TeacherClient, "submit_status", lambda client, limit: checked.append(limit) or submit_status(client, limit)
    )
    monkeypatch.setattr(OffsetEngine, "step", lambda engine: [])
    with (
        service(0) as port,
        open_teachers(configured(f"server_port={port}", "timeout_s=1"), ROUTES) as teachers,
        pytest.raises(TeacherTimeout),
    ):
        asyncio.run(teachers.score([pair(0)], step=0))
    assert len(checked) > 1 and warnings(caplog) == []


def test_result_of_cancelled_wait_cancels_request() -> None:
    async def run() -> None:
        request = client.submit([SEQUENCE])
        wait = asyncio.create_task(
            outages.OutageMonitor({"a": client}, config).result_of("a", asyncio.wrap_future(request))
        )
        await asyncio.sleep(0.2)
        wait.cancel()
        await asyncio.wait([wait])
        assert wait.cancelled() and request.cancelled()
        with pytest.raises(TeacherUnavailable):
            await outages.OutageMonitor({"a": client}, config).result_of(
                "a", asyncio.wrap_future(client.submit([SEQUENCE], 0.2))
            )

    config = configured().actor_rollout_ref.teacher
    with TeacherClient(server_port=free_port()) as client:
        asyncio.run(run())


def test_check_is_shared_by_all_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        address = "tcp://none"
        n_checks = 0

        def submit_status(self, timeout_s: float) -> Future[ServiceStatus]:
            self.n_checks += 1
            return Future()

    async def run() -> None:
        monitor = outages.OutageMonitor({"a": client, "b": client}, configured().actor_rollout_ref.teacher)  # type: ignore[dict-item]
        waits = [asyncio.create_task(monitor.result_of("ab"[i % 2], asyncio.wrap_future(Future()))) for i in range(20)]
        await wait_until_async(lambda: client.n_checks > 0)
        await asyncio.sleep(5 * outages.FIRST_CHECK_S)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)

    monkeypatch.setattr(outages, "CHECK_EVERY_S", 60.0)
    client = Client()
    asyncio.run(run())
    assert client.n_checks == 1


class LateStatusClient:
    """Client whose statuses arrive when the test completes their futures."""

    address = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.statuses: list[Future[ServiceStatus]] = []

    def submit_status(self, timeout_s: float) -> Future[ServiceStatus]:
        self.statuses.append(Future())
        return self.statuses[-1]


def test_status_from_before_the_recovery_begins_no_second_outage(caplog: pytest.LogCaptureFixture) -> None:
    client, without_workers = LateStatusClient(), replace(STATUS, workers=())
    clients: dict[str, Any] = {"first": client, "second": client}

    async def run() -> None:
        monitor = outages.OutageMonitor(clients, configured().actor_rollout_ref.teacher)
        waiting: Future[int] = Future()
        result = asyncio.create_task(monitor.result_of("second", asyncio.wrap_future(waiting)))
        await wait_until_async(lambda: len(client.statuses) == 1)
        client.statuses[0].set_result(without_workers)
        await wait_until_async(lambda: len(client.statuses) == 2)
        finished: Future[int] = Future()
        finished.set_result(1)
        assert await monitor.result_of("first", asyncio.wrap_future(finished)) == 1
        client.statuses[1].set_result(without_workers)
        await wait_until_async(lambda: len(client.statuses) == 3)
        waiting.set_result(2)
        assert await result == 2

    asyncio.run(run())
    assert len(warnings(caplog)) == 2  # the outage and its end
