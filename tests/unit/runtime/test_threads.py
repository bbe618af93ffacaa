"""Functions in daemon threads: results, errors, and threads that are used again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from recipe_gkd.runtime import threads
from recipe_gkd.runtime.threads import in_thread, run_until, start_in_thread


def test_result_and_error_are_those_of_the_function() -> None:
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 7, 0))


def test_thread_is_used_again_under_the_name_of_its_function() -> None:
    def describe() -> tuple[int, str]:
        return threading.get_ident(), threading.current_thread().name

    async def call_each() -> list[tuple[int, str]]:
        found = []
        for _ in range(50):
            found.append(await in_thread(describe))
            await asyncio.sleep(0.001)  # its thread may be idle only after the result has been delivered
        return found

    found = asyncio.run(call_each())
    assert len(set(found)) < 10 and {name for _, name in found} == {"in_thread:describe"}


def test_function_that_never_returns_holds_up_no_other_one_and_not_the_exit() -> None:
    program = (
        "import threading, time\n"
        "from recipe_gkd.runtime.threads import start_in_thread\n"
        "blocked = [start_in_thread(threading.Event().wait) for _ in range(3)]\n"
        "assert [start_in_thread(pow, 2, n).result(timeout=60) for n in range(5)] == [1, 2, 4, 8, 16]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_few_idle_threads_are_kept() -> None:
    released = threading.Event()
    futures = [start_in_thread(released.wait) for _ in range(3 * threads._MAX_IDLE)]
    released.set()
    assert all(future.result(timeout=60) for future in futures)
    deadline = time.monotonic() + 60
    while sum(thread.name.startswith("in_thread:wait") for thread in threading.enumerate()) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    idle = sum(thread.name == "in_thread:idle" for thread in threading.enumerate())
    assert idle < 2 * threads._MAX_IDLE


def test_child_of_a_fork_starts_its_own_threads() -> None:
    asyncio.run(in_thread(divmod, 7, 2))
    pid = os.fork()
    if not pid:
        os._exit(0 if start_in_thread(divmod, 7, 2).result(timeout=60) == (3, 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_run_until_returns_at_the_deadline() -> None:
    found = run_until(time.monotonic() + 0.5, [lambda: 1, lambda: 1 // 0, threading.Event().wait])
    assert found == [1, None, None]
