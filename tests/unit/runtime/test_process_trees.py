from __future__ import annotations

import subprocess
from dataclasses import replace

import psutil
import pytest

from recipe_gkd.runtime import process_trees
from teacher.common.process_id import is_alive


def test_end_trees_identifies_processes_after_a_clock_step_and_pid_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
    known = process_trees.tree([child.pid for child in children])
    monkeypatch.setattr(psutil.Process, "create_time", lambda *_, **__: 0.0)  # psutil's value after a clock step
    earlier = replace(known[1], start_ticks=known[1].start_ticks - 1)  # a process that had the pid before
    try:
        assert process_trees.kill_trees([known[0], earlier], 5.0) == []
        assert not is_alive(known[0]) and is_alive(known[1])
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_kill_older_kills_a_process_only_if_it_is_older() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 3600 & wait"])
    try:
        assert not process_trees.kill_older(child.pid, 30.0, 5.0) and child.poll() is None
        members = process_trees.tree([child.pid])
        assert process_trees.kill_older(child.pid, -1.0, 5.0)
        assert not any(map(is_alive, members)) and not process_trees.kill_older(child.pid, -1.0, 5.0)
    finally:
        child.kill()
        child.wait()
