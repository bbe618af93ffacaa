"""Benchmark of the teacher service: its figures and its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.teacher_service import REPO, processes_of
from tests._support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, str(REPO / "benchmarks" / "teacher_service.py"), "--quick"]


def test_benchmark_writes_figures_and_ends_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "teacher.json"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, "--json", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    for name in (
        "service_over_engine",
        "tokens_per_second_1_workers",
        "tokens_per_second_2_workers",
        "codec_over_torch_save",
        "kill_recovery_s",
    ):
        assert figures[name] > 0
    assert figures["bytes_per_position"] - figures["bytes_per_position_float16"] == pytest.approx(2 * 16)
    assert figures["bytes_per_position"] == pytest.approx(8 * 16 + 4, rel=0.01)
    assert processes_of(tmp_path) == []


def test_benchmark_interrupted_at_start_ends_its_processes(tmp_path: Path) -> None:
    running = subprocess.Popen(COMMAND, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True)
    try:

        def proxy_started() -> bool:
            assert running.poll() is None
            return bool(list(tmp_path.glob("*/service/proxy.pid")))

        wait_until(proxy_started)
        os.killpg(running.pid, signal.SIGINT)  # like Ctrl-C
        assert running.wait(timeout=PATIENCE_S) != 0
    finally:
        running.kill()
        running.wait(timeout=PATIENCE_S)
    assert processes_of(tmp_path) == []


def test_proxy_benchmark_reports_every_case_and_ends_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "proxy.json"
    command = [sys.executable, str(REPO / "benchmarks" / "teacher_proxy.py"), "--megabytes", "4", "--json", str(path)]
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    for kind in ("plain", "curve"):
        assert figures[f"{kind}_bound_4_over_1_threads"] > 0
        for threads in (1, 4):
            assert figures[f"{kind}_{threads}_threads_mb_per_s"] > 0
    assert processes_of(tmp_path) == []
