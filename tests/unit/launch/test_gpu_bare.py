"""The script for a GPU machine without a network, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._support.repository import REPO

SCRIPT = REPO / "launch" / "gpu_bare.sh"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "DEVICE": "cpu"} | variables
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_run_writes_results_of_the_chosen_checks(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    out = tmp_path / "results"
    done = run("run", str(tmp_path / "wheels"), str(out), ONLY="smoke", CHECKS="kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check["status"] for check in json.loads((out / "smoke.json").read_text())["checks"]}
    assert checks == {"machine": "passed", "kernels": "passed"}


def test_failed_part_is_named_and_later_parts_run(tmp_path: Path) -> None:
    """A name that does not exist makes the first part fail."""
    done = run(
        "run", str(tmp_path), str(tmp_path / "results"), ONLY="smoke benchmarks", CHECKS="nothing", SECTIONS="none"
    )
    assert done.returncode == 1
    assert "== benchmarks" in done.stdout
    assert done.stderr.splitlines()[-1] == "failed: smoke benchmarks"


@pytest.mark.parametrize("arguments", [(), ("fetch",), ("run", "wheels"), ("other", "wheels")])
def test_wrong_arguments_print_the_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "bash launch/gpu_bare.sh fetch WHEELS" in done.stderr


def test_every_fetched_package_is_pinned() -> None:
    text = SCRIPT.read_text()
    packages = text.partition("packages=(\n")[2].partition(")")[0].split()
    pinned = {line.partition("==")[0] for line in (REPO / "constraints" / "gpu.txt").read_text().splitlines()}
    assert len(packages) > 10 and set(packages) <= pinned
