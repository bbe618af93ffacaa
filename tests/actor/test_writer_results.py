"""No process of the checkpoint writers outlives the worker that it belongs to."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

WORKER = """
import sys
from recipe_gkd.actor import writer_results
if __name__ == "__main__":
    print(writer_results._manager()._process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(60)
def test_queue_of_the_writers_ends_when_its_worker_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        server = psutil.Process(int(worker.stdout.readline()))
        try:
            worker.kill()
            server.wait(timeout=20)
        finally:
            if server.is_running():
                server.kill()
