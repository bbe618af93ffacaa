"""``benchmarks/gpu.py`` in miniature on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_benchmark_on_cpu_measures_every_section(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(REPO / "benchmarks/gpu.py"), "--device", "cpu", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    rows = {name: section["rows"] for name, section in found["sections"].items()}
    assert {row["method"] for row in rows["losses"] if row.get("ms")} >= {"plain", "ours", "ours, fused head"}
    assert [row["transport"] for row in rows["transports"] if row["gb_per_s"] > 0] == ["collective", "ipc"]
    assert [row["fused_head"] for row in rows["actor"] if row["tokens_per_s"] > 0] == [False, True]
    assert [row["head_dtype"] for row in rows["mismatch"]] == ["float32", "model"]
    assert all(0 < row["rollout_probs_diff_mean"] < 0.01 for row in rows["mismatch"])
    [teacher] = rows["teacher"]
    assert teacher["engine_tokens_per_s"] > 0 and teacher["service_tokens_per_s"] > 0
