"""The benchmark of the actor runs, and both of its programs compute the same update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

PROGRAM = REPO / "benchmarks" / "actor.py"


@pytest.mark.slow
def test_quick_benchmark_writes_all_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--quick", "--json", str(tmp_path / "figures.json")]
    subprocess.run(
        command, check=True, timeout=PATIENCE_S, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = json.loads((tmp_path / "figures.json").read_text())
    for key in (
        "step_over_transformers",
        "step_over_transformers_uneven",
        "host_us_per_token_k64",
        "host_us_per_token_k256",
        "packing_us_per_token_k64",
        "packing_us_per_token_k256",
    ):
        assert found[key] > 0, key
