from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.waiting import PATIENCE_S

SLOW_AGENT = """
import os, time
from pathlib import Path
command, marker = Path("/proc/self/cmdline").read_text(), Path(os.environ["SLOW_AGENT_MARKER"])
if "dashboard/agent.py" in command and not marker.exists():
    marker.touch()
    time.sleep(3600)
"""
START = """
import logging
logging.basicConfig(level=logging.WARNING)
import ray
from recipe_gkd.ray_cluster.connection import start_local_cluster
start_local_cluster(num_cpus=1, include_dashboard=False)
print("started", len(ray.nodes()))
"""


@pytest.mark.slow
def test_start_local_cluster_first_agent_too_slow_starts_another_raylet(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SLOW_AGENT_MARKER": str(tmp_path / "marker")}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "Ray did not start within 30 s" in done.stderr and "started 1" in done.stdout, done.stdout + done.stderr
