from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe_gkd.diagnostics import node_agent
from recipe_gkd.runtime import process_trees, scratch
from teacher.common.process_id import process_id

NCCL_RECORDER = """
import os
os.environ["TORCH_FR_BUFFER_SIZE"] = "1"
from recipe_gkd.diagnostics import stack_dumps
stack_dumps.enable_stack_dumps()
prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
os.mkfifo(prefix + "3.pipe")
open(prefix + "3.pipe").read(1)
open(prefix + "3", "w").write("dump")
"""
"""A process that waits on a named pipe and writes a dump, like torch's ``ProcessGroupNCCL``."""


class TestInspect:
    def test_nccl_dump_is_requested_by_pipe_and_collected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
        process = subprocess.Popen([sys.executable, "-c", NCCL_RECORDER], env=os.environ | {"TMPDIR": str(tmp_path)})
        while not (pipes := list(tmp_path.glob("*/nccl_3.pipe"))):
            time.sleep(0.01)
        time.sleep(0.2)
        assert node_agent.inspect([process.pid], str(tmp_path), 5)[process.pid].nccl_dumps == {"nccl_3": b"dump"}
        ended = process_id(process.pid)
        process.wait(10)
        # The dump of a dead process is collected too, until its scratch folder is removed.
        assert node_agent.inspect([process.pid], str(tmp_path), 5)[process.pid].nccl_dumps == {"nccl_3": b"dump"}
        assert ended is not None
        process_trees.end([ended], 0.0, 1.0)
        assert not pipes[0].parent.exists()

    def test_missing_nccl_dumps_of_many_workers_share_one_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=0.0)

        def sleep(seconds: float) -> None:
            clock.now += seconds

        monkeypatch.setattr(node_agent, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
        monkeypatch.setattr(node_agent, "run_until", lambda _, calls: [None for _ in calls])
        monkeypatch.setattr(node_agent, "_request_nccl_dumps", lambda pid: {tmp_path / f"nccl_{pid}": 0.0})
        found = node_agent.inspect(range(1, 9), str(tmp_path), 2.0)
        assert len(found) == 8 and clock.now < 2.1
