"""Markdown table of quickstart runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.errors import DataError
from recipe_gkd.quickstart.table import HEADER, main, read_reports, render_table
from tests._support.errors import raises

REPORT: dict[str, Any] = {
    "accuracy": {"teacher": 0.996, "student_before": 0.244, "student_after": 1.0},
    "steps": 250,
    "seconds": {"step": {"total": 91.94, "mean": 0.3677}, "update_actor": {"total": 30.0, "mean": 0.12}},
    "memory_gb": {"actor": 0.8125},
    "stages": {"distillation": 118},
    "machine": "2 cores of a processor, 23 GiB",
}
HYBRID = REPORT | {"memory_gb": {"actor": 0.8, "generate": 2.0, "update": 2.5, "sync": 2.25}}


def test_render_table_has_a_row_per_run_and_each_machine_once() -> None:
    header, _, default, hybrid, _, machine = render_table({"default": REPORT, "hybrid": HYBRID}).splitlines()
    assert len(header.split("|")) == len(HEADER) + 2
    assert default == "| default | 24.4% | 100.0% | 99.6% | 250 | 118 | 91.9 | 0.120 | 0.81 | - | - | - |"
    assert hybrid.endswith("| 0.80 | 2.00 | 2.50 | 2.25 |")
    assert machine == REPORT["machine"]


def test_render_table_report_without_memory_names_run_and_remedy() -> None:
    with raises(DataError, column="memory_gb"):
        render_table({"old": {name: value for name, value in REPORT.items() if name != "memory_gb"}})


def test_read_reports_unfinished_run_is_named(tmp_path: Path) -> None:
    with raises(DataError, file=tmp_path / "report.json"):
        read_reports({"lora": tmp_path})


def test_command_takes_folder_names_with_equals_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "quickstart,trainer.scheduler=sync"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(REPORT))
    assert main(["--run", f"sync={folder}"]) == 0
    assert "| sync | 24.4% |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--run", "no folder"])
