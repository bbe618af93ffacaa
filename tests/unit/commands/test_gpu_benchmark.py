"""``benchmarks/gpu.py`` without its sections: failures, the JSON file, and the table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu
import pytest


@pytest.fixture
def failing_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the section ``teacher`` hang after a row. The others write a row."""

    def run(command: Sequence[str], *, variables: Mapping[str, str], log: Path, deadline_s: float) -> int | None:
        Path(command[command.index("--rows") + 1]).write_text('{"tokens_per_s": 12345.6, "mfu": null}\n')
        log.write_text("Fatal error: CUDA\n")
        assert variables["CUDA_VISIBLE_DEVICES"] == ""
        return None if command[2] == "teacher" else 0

    monkeypatch.setattr(gpu, "run_with_deadline", run)


def test_section_that_hangs_keeps_its_rows_and_fails(
    failing_section: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--only", "losses", "teacher", "--deadline-s", "7", "--json", str(file)]
    assert gpu.main(arguments) == 1
    sections = json.loads(file.read_text())["sections"]
    assert sections["losses"]["error"] is None
    assert sections["teacher"]["error"] == "no end within 7 s\nFatal error: CUDA"
    assert [len(section["rows"]) for section in sections.values()] == [1, 1]
    assert "tokens_per_s  mfu\n      12,346    -" in capsys.readouterr().out


def test_benchmark_without_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "gpu_names", lambda device: [])
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "torch finds no GPU; check `nvidia-smi`, or use --device cpu" in capsys.readouterr().err
