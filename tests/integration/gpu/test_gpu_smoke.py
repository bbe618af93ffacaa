"""The checks of ``python -m recipe_gkd gpu_smoke``: each on a GPU, and on a CPU the fast ones, or all (slow)."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from recipe_gkd.commands import gpu_smoke
from recipe_gkd.commands.gpu_smoke.checks import CHECKS

FAST_ON_CPU = ("kernels", "output_layer", "transport_ipc")


def run_smoke(tmp_path: Path, *arguments: str) -> dict[str, dict[str, str]]:
    """Run the command, assert its exit status, and return the results by name."""
    file = tmp_path / "smoke.json"
    status = gpu_smoke.main([*arguments, "--json", str(file)])
    found = json.loads(file.read_text())
    results = {check["name"]: check for check in found["checks"]}
    failed = {name: check["detail"] for name, check in results.items() if check["status"] == "FAILED"}
    assert (status, found["passed"], failed) == (0, True, {})
    return results


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_check_on_gpu_passes(name: str, tmp_path: Path) -> None:
    result = run_smoke(tmp_path, "--device", "cuda", "--only", name)[name]
    if result["status"] != "passed":
        pytest.skip(result["detail"])


@pytest.mark.slow
def test_fast_checks_on_cpu_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_smoke(tmp_path, "--device", "cpu", "--only", *FAST_ON_CPU)
    assert list(results) == ["machine", *FAST_ON_CPU]
    assert {result["status"] for result in results.values()} == {"passed"}
    assert "4 passed" in capsys.readouterr().out


@pytest.mark.slow
def test_all_checks_on_cpu_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mkdtemp(prefix="t_")  # pytest's folder is too long for the sockets of an engine's ranks
    monkeypatch.setattr(gpu_smoke.command, "mkdtemp", lambda **_: folder)  # type: ignore[attr-defined]
    results = run_smoke(tmp_path, "--device", "cpu")
    assert list(results) == [check.name for check in CHECKS]
    assert {result["status"] for result in results.values()} == {"passed"}
    assert not Path(folder).exists(), "files were left"
