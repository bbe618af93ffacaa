"""``benchmarks/scale.py`` in miniature: it runs, and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.repository import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

from scale_model import DriverCosts, Observation, extrapolate

from tests._support.waiting import PATIENCE_S


@pytest.mark.slow
def test_quick_benchmark_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    command = [sys.executable, "benchmarks/scale.py", "--quick", "--steps", "2", "--json", str(file)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["driver_us_per_response_token"] > 0 and found["driver_mb_per_gb_of_rows"] >= 0
    assert len(found["cases"]) == 2 and all(row["million_rows_k_per_s"] > 0 for row in found["cases"].values())


def test_costs_of_the_driver_are_recovered_and_extrapolated() -> None:
    true = DriverCosts(step=0.02, response=1e-4, token=1e-8, replica=5e-4, rank=0.0)
    sizes = [(64, 1e5, 4, 4), (64, 1e5, 1, 1), (64, 2e5, 16, 8), (256, 1e5, 64, 16), (16, 1e5, 4, 4), (64, 3e5, 4, 9)]
    observations = [
        Observation(true.of(responses=r, tokens=t, replicas=p, ranks=n), r, t, p, n) for r, t, p, n in sizes
    ]
    costs = DriverCosts.fit(observations)
    for name in ("step", "response", "token", "replica"):
        assert getattr(costs, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    small, large = (extrapolate(costs, worker_gb_per_s=0.5, n_gpus=n) for n in (64, 1024))
    assert large["rows_gb"] == pytest.approx(16 * small["rows_gb"])
    assert large["scoring_worker_s"] == pytest.approx(small["scoring_worker_s"])  # as many nodes more
    assert large["driver_s"] > 10 * small["driver_s"] - 1
