from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.addition.task import DATA_SOURCE
from recipe_gkd.commands.report.run_files import read_run
from recipe_gkd.errors import DataError
from recipe_gkd.quickstart.report import main, read_accuracies, render, summarize
from tests._support.errors import raises

CONFIG = "gkd: {distill_loss_type: jsd, custom_loss: {path: null, name: null}}\n"
STAGES = [{"stage": "set-up", "seconds": 130}, {"stage": "distillation", "seconds": 90}]


def evaluation(*accuracies: float, n: int = 200) -> dict[str, Any]:
    """Return a result of ``evaluate --json`` for models with these accuracies."""
    scores = [{DATA_SOURCE: {"n_prompts": n, "mean": accuracy}} for accuracy in accuracies]
    return {"data": "held_out.parquet", "models": [{"model": "m", "scores": score} for score in scores]}


def step(number: int, **more: float) -> dict[str, Any]:
    return {
        "training/global_step": number,
        "training/staleness_mean": 0.5 * number,
        "training/staleness_max": number,
        "perf/total_num_tokens": 1000,
        "actor/kl_loss": 1.0 / number,
        "timing/gen": 0.25,
        "timing/update_actor": 0.5,
    } | more


def write_run(folder: Path, *steps: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def write_evaluations(folder: Path, n_after: int = 200) -> dict[str, Path]:
    (folder / "before.json").write_text(json.dumps(evaluation(0.99, 0.2)))
    (folder / "after.json").write_text(json.dumps(evaluation(0.95, n=n_after)))
    before = folder / "before.json"
    return {"teacher": before, "student_before": before, "student_after": folder / "after.json"}


def test_summary_of_a_resumed_run_counts_no_step_twice(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        {"training/global_step": 0, "val/accuracy": 0.1},
        step(1, **{"perf/max_memory_allocated_gb": 0.5, "perf/memory_gb/update": 2.5}),
        step(2, **{"timing/gen": 5.0}),
        step(2, **{"timing/gen": 0.75, "perf/memory_gb/update": 2.25, "actor/kl_loss": 0.1}),
        {"training/global_step": 2, "val/accuracy": 1.0},
    )
    summary = summarize(read_run(run))
    assert (summary["steps"], summary["tokens"], summary["loss"]) == (2, 2000, "jsd")
    assert summary["memory_gb"] == {"actor": 0.5, "update": 2.5}
    assert summary["kl_loss"] == {"first": 1.0, "last": 0.1}
    assert summary["staleness"] == {"mean": 0.75, "max": 2.0}
    assert summary["seconds"] == {"gen": {"total": 1.0, "mean": 0.5}, "update_actor": {"total": 1.0, "mean": 0.5}}


def test_missing_metrics_are_null_and_rendered(tmp_path: Path) -> None:
    summary = summarize(read_run(write_run(tmp_path / "run", {"training/global_step": 1, "x": 1.0})))
    assert summary["tokens"] is summary["kl_loss"] is summary["staleness"]["mean"] is None and summary["seconds"] == {}
    accuracy = dict.fromkeys(("teacher", "student_before", "student_after"), 0.5)
    rest = {"problems": 1, "accuracy": accuracy, "teacher": "teacher", "stages": {}, "versions": {}}
    assert "not recorded" in render(summary | rest)


def test_accuracies_come_from_the_files_of_evaluate(tmp_path: Path) -> None:
    expected = {"teacher": 0.99, "student_before": 0.2, "student_after": 0.95}
    assert read_accuracies(write_evaluations(tmp_path)) == (200, expected)


def test_evaluations_of_different_problems_are_refused(tmp_path: Path) -> None:
    with raises(DataError, file=tmp_path / "after.json"):
        read_accuracies(write_evaluations(tmp_path, n_after=100))


def test_file_of_another_command_is_refused(tmp_path: Path) -> None:
    files = write_evaluations(tmp_path)
    files["teacher"].write_text("{}")
    with raises(DataError, file=tmp_path / "before.json"):
        read_accuracies(files)


@pytest.mark.parametrize("teacher", ["teacher", "teacher: the initial student, with the solution"])
def test_command_writes_json_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], teacher: str
) -> None:
    files = write_evaluations(tmp_path)
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(stage) + "\n" for stage in STAGES))
    out = tmp_path / "o" / "r.json"
    arguments = [
        str(write_run(tmp_path / "run", step(1))), f"--prepared={tmp_path}", f"--stages={tmp_path / 's.jsonl'}",
        f"--teacher={files['teacher']}", f"--before={files['student_before']}", f"--after={files['student_after']}",
        f"--out={out}", *([] if teacher == "teacher" else ["--self"]),
    ]  # fmt: skip
    assert main(arguments) == 1
    assert "made.json" in capsys.readouterr().err
    for name in ("data", "teacher", "student", "self_student"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made.json").write_text("{}")
    assert main(arguments) == 0
    table = capsys.readouterr().out
    for shown in ("99.0%", "20.0%", "95.0%", f"  {teacher}  ", "loss (jsd), first and last step", "update_actor"):
        assert shown in table
    report = json.loads(out.read_text())
    assert report["stages"] == {"set-up": 130, "distillation": 90} and report["problems"] == 200
    assert {"python", "torch", "transformers"} <= set(report["versions"]) and " cores of " in report["machine"]
