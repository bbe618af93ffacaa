"""The start of Ray on this machine: recipe_gkd/ray_cluster/connection.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster import connection

TIMED_OUT = "The current node timed out during startup. This could happen because ..."
SLOW_AGENT = """
import os, time
from pathlib import Path
command, marker = Path("/proc/self/cmdline").read_text(), Path(os.environ["SLOW_AGENT_MARKER"])
if "dashboard/agent.py" in command and not marker.exists():
    marker.touch()
    time.sleep(60)
"""
START = """
import logging
logging.basicConfig(level=logging.WARNING)
import ray
from recipe_gkd.ray_cluster.connection import start_local_cluster
start_local_cluster(num_cpus=1, include_dashboard=False)
print("started", len(ray.nodes()))
"""


def test_start_local_cluster_ray_times_out_is_tried_again_without_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(**settings: object) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) == 1:
            raise Exception(TIMED_OUT)

    monkeypatch.setattr(ray, "init", init)
    try:
        connection.start_local_cluster(num_cpus=1)
        assert [process.poll() for process in started] == [-9, None]
        assert "trying again" in caplog.text
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_start_local_cluster_ray_never_starts_raises_an_error_that_names_the_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**settings: object) -> None:
        raise Exception(TIMED_OUT)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ResourceError, match=r"3 attempts of 30 s.*raylet.err.*session_latest/logs"):
        connection.start_local_cluster()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_start_local_cluster_agent_of_the_first_raylet_is_too_slow_starts_another(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SLOW_AGENT_MARKER": str(tmp_path / "marker")}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert "Ray did not start within 30 s" in done.stderr and "started 1" in done.stdout, done.stdout + done.stderr
