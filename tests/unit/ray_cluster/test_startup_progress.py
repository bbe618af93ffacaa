"""Progress of the start of the workers."""

from __future__ import annotations

import asyncio
import logging

import pytest

from recipe_gkd.ray_cluster.startup_progress import StartupProgress
from tests._support.waiting import wait_until_async


def test_progress_is_logged_at_each_change_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def logged(text: str) -> int:
        return sum(text in message for message in caplog.messages)

    async def reached(text: str, times: int = 1) -> None:
        await wait_until_async(lambda: logged(text) >= times)

    async def start() -> None:
        async with StartupProgress(repeat_s=0.05, min_interval_s=0.01) as progress:
            done = progress.begin("actor", 2, "loading the student")
            progress.begin("rollout", 1, "starting engines")(0)
            await reached("actor workers loading the student: 0 of 2 done after 0 s; rollout workers", times=2)
            done(1)
            await reached("actor workers loading the student: 1 of 2 done")
            done(0)
            await reached("actor workers loading the student: done; rollout workers starting engines: done")

    asyncio.run(start())
    assert caplog.messages[-1] == "start: all workers are ready after 0 s"


def test_progress_of_a_failed_start_does_not_end_with_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def start() -> None:
        async with StartupProgress() as progress:
            progress.begin("actor", 1, "loading the student")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        asyncio.run(start())
    assert not [message for message in caplog.messages if "ready" in message]
