"""Task groups, cleanup that a cancellation does not interrupt, and daemon threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from recipe_gkd.runtime.tasks import FirstErrorTaskGroup, run_to_end
from recipe_gkd.runtime.threads import in_thread, run_until


class TestFirstErrorTaskGroup:
    @pytest.mark.parametrize("in_a_task", [True, False])
    def test_failure_lets_other_tasks_clean_up(self, in_a_task: bool) -> None:
        cleaned: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.05)
                cleaned.append("in order")

        async def fail() -> None:
            raise ZeroDivisionError from cause

        async def scenario() -> None:
            async with FirstErrorTaskGroup() as tasks:
                tasks.start(work())
                await asyncio.sleep(0)
                if in_a_task:
                    tasks.start(fail())
                    await asyncio.sleep(3600)
                await fail()

        cause = KeyError("the cause")
        with pytest.raises(ZeroDivisionError) as caught:
            asyncio.run(scenario())
        assert cleaned == ["in order"]
        assert caught.value.__cause__ is cause and caught.value.__suppress_context__


class TestDrop:
    @pytest.mark.parametrize("fails", [True, False])
    def test_dropped_tasks_end_and_their_errors_end_nothing(self, fails: bool) -> None:
        ended: list[str] = []

        async def stage(name: str) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.01)
                ended.append(name)
                if fails:
                    raise ArithmeticError(name)

        async def work() -> str:
            async with FirstErrorTaskGroup() as tasks:
                tasks.start(stage("running"))
                await asyncio.sleep(0)
                tasks.start(stage("not started yet"))
                tasks.drop()
                tasks.start(stage("too late"))
                await tasks.drained(10)
                assert ended == ["running"]
                await asyncio.sleep(0.05)
            return "saved"

        assert asyncio.run(asyncio.wait_for(work(), 20)) == "saved"

    def test_drain_ends_at_its_deadline(self, caplog: pytest.LogCaptureFixture) -> None:
        async def stubborn() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.5)

        async def work() -> None:
            async with FirstErrorTaskGroup() as tasks:
                tasks.start(stubborn())
                await asyncio.sleep(0)
                tasks.drop()
                await tasks.drained(0.05)
                assert "1 tasks that were dropped have not ended within 0.05 s" in caplog.text

        asyncio.run(asyncio.wait_for(work(), 20))


class TestRunToEnd:
    def test_canceled_caller_waits_for_end(self) -> None:
        done: list[str] = []

        async def clean() -> None:
            await asyncio.sleep(0.1)
            done.append("clean")

        async def scenario() -> None:
            caller = asyncio.ensure_future(run_to_end(clean()))
            for _ in range(3):
                await asyncio.sleep(0.01)
                caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller

        asyncio.run(scenario())
        assert done == ["clean"]

    def test_result_and_error_are_passed_on(self) -> None:
        async def work(result: int) -> float:
            await asyncio.sleep(0)
            return 1 / result

        assert asyncio.run(run_to_end(work(2))) == 0.5
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run_to_end(work(0)))


class TestInThread:
    def test_result_and_error_are_passed_on(self) -> None:
        assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(in_thread(divmod, 7, 0))

    def test_blocked_thread_does_not_delay_exit(self) -> None:
        """Neither the event loop nor the interpreter joins the thread."""
        program = """
import asyncio, threading
from recipe_gkd.runtime.threads import in_thread
async def main():
    try:
        await asyncio.wait_for(in_thread(threading.Event().wait), 0.2)
    except TimeoutError:
        print("abandoned")
asyncio.run(main())
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and done.stdout == "abandoned\n", done.stderr


class TestRunUntil:
    def test_late_and_failed_calls_return_none(self) -> None:
        blocked = threading.Event()
        calls = [lambda: 1, lambda: blocked.wait(60) and 2, lambda: 1 // 0]
        assert run_until(time.monotonic() + 1, calls) == [1, None, None]
        blocked.set()
