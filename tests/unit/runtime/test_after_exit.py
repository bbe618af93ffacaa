from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from teacher.common.process_id import ProcessId, process_id

KILLED_HOLDER = """
import os, signal, sys
from recipe_gkd.runtime.after_exit import kill_after_this_process
from teacher.common.process_id import ProcessId
kill_after_this_process(eval(sys.argv[1]), *sys.argv[2:])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two processes."""
    processes = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def identity(process: subprocess.Popen[bytes]) -> ProcessId:
    found = process_id(process.pid)
    assert found is not None
    return found


def test_kill_after_this_process_kills_by_identity_after_the_holder_is_killed(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    sleeper, other = sleepers
    reused_pid = replace(identity(other), start_ticks=identity(other).start_ticks - 1)
    subprocess.run([sys.executable, "-c", KILLED_HOLDER, repr([reused_pid, identity(sleeper)])], timeout=60)
    assert sleeper.wait(timeout=60) == -9
    assert other.poll() is None


def test_kill_after_this_process_kills_by_argument(sleepers: list[subprocess.Popen[bytes]]) -> None:
    """The argument is not a pattern: ``.`` is a dot."""
    name = f"--name=[{os.getpid()}].session"
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    named, similar = (subprocess.Popen([*command, argument]) for argument in (name, name.replace(".", "_")))
    try:
        subprocess.run([sys.executable, "-c", KILLED_HOLDER, repr([identity(sleepers[0])]), name], timeout=60)
        assert named.wait(timeout=60) == -9
        assert sleepers[0].wait(timeout=60) == -9
        assert similar.poll() is None
    finally:
        similar.kill()
        similar.wait()
