from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

PROGRAM = REPO / "benchmarks" / "losses.py"


@pytest.mark.slow
def test_quick_benchmark_writes_all_keys(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--quick", "--repeats", "1", "--json", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True)
    found = json.loads((tmp_path / "figures.json").read_text())
    for key in (
        "time_over_log_softmax",
        "extra_memory_over_autograd",
        "fused_peak_over_logits",
        "analytic_over_log_softmax_float32",
        "in_place_over_log_softmax_float32",
        "fused_head_over_head_float32",
        "fused_head_memory_over_logits_float32",
    ):
        assert found[key] > 0, key
    ways = [row["way"] for row in found["rows"]]
    assert ways == ["log_softmax", "autograd", "analytic", "in_place", "head", "fused_head"]
