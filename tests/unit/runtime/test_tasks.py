"""Tasks that fail together, cleanup that is not canceled, and threads that nobody waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from recipe_gkd.runtime.tasks import FirstErrorTaskGroup, run_to_end
from recipe_gkd.runtime.threads import in_thread, run_until


class TestTasks:
    """Cleanup of a task that is canceled because another one, or the body, has failed."""

    @pytest.mark.parametrize("in_a_task", [True, False])
    def test_cleanup_of_the_others_is_not_interrupted_by_a_failure(self, in_a_task: bool) -> None:
        cleaned: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                cleaned.append("in order")

        async def fail() -> None:
            raise ZeroDivisionError

        async def scenario() -> None:
            async with FirstErrorTaskGroup() as tasks:
                tasks.start(work())
                await asyncio.sleep(0)
                if in_a_task:
                    tasks.start(fail())
                    await asyncio.sleep(60)
                await fail()

        with pytest.raises(ZeroDivisionError):
            asyncio.run(scenario())
        assert cleaned == ["in order"]

    def test_a_canceled_caller_waits_for_the_end_and_is_canceled_then(self) -> None:
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

    def test_the_result_and_the_error_are_passed_on(self) -> None:
        async def work(result: int) -> float:
            await asyncio.sleep(0)
            return 1 / result

        assert asyncio.run(run_to_end(work(2))) == 0.5
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run_to_end(work(0)))


class TestThreads:
    def test_results_and_errors_come_back(self) -> None:
        assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(in_thread(divmod, 7, 0))

    def test_calls_that_do_not_return_in_time_are_left_out(self) -> None:
        hang = threading.Event()
        calls = [lambda: 1, lambda: hang.wait(60) and 2, lambda: 1 // 0]
        assert run_until(time.monotonic() + 1, calls) == [1, None, None]
        hang.set()

    def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process(self) -> None:
        """Neither the end of the event loop nor that of the interpreter, which join other threads."""
        program = """
import asyncio, threading
from recipe_gkd.runtime.threads import in_thread
async def main():
    try:
        await asyncio.wait_for(in_thread(threading.Event().wait), 0.2)
    except TimeoutError:
        print("left behind")
asyncio.run(main())
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and done.stdout == "left behind\n", done.stderr
