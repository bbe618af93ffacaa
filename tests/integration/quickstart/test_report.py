from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.errors import DataError
from recipe_gkd.quickstart.report import RunResults, build_report, main, read_metrics, render
from tests._support.errors import raises


def _evaluation(accuracy: float, n: int = 200) -> dict[str, Any]:
    return {"model": "m", "data": "held_out.parquet", "n": n, "n_exact": round(accuracy * n), "accuracy": accuracy}


def _step(step: int, **more: float) -> dict[str, Any]:
    return {
        "training/global_step": step,
        "training/staleness_mean": 0.5 * step,
        "training/staleness_max": step,
        "perf/total_num_tokens": 1000,
        "actor/kl_loss": 1.0 / step,
        "response_seq_len/average": 30.0 + step,
        "timing/gen": 0.25,
        "timing/update_actor": 0.5,
    } | more


STAGES = [{"stage": "set-up", "seconds": 130}, {"stage": "distillation", "seconds": 90}]
EVALUATIONS = {"teacher": _evaluation(0.99), "before": _evaluation(0.2), "after": _evaluation(0.95)}


def _results(metrics: list[dict[str, Any]], **more: Any) -> RunResults:
    defaults: dict[str, Any] = dict(evaluations=EVALUATIONS, stages=[], prepared={}, versions={})
    return RunResults(metrics=metrics, **(defaults | more))


def test_build_report_summarizes_a_run() -> None:
    metrics = [
        _step(1, **{"perf/max_memory_allocated_gb": 0.5, "perf/memory_gb/update": 2.5}),
        _step(2, **{"timing/gen": 0.75, "perf/memory_gb/update": 2.25}),
    ]
    report = build_report(_results(metrics, stages=STAGES, prepared={"teacher": {"steps": 9}}, versions={"torch": "1"}))
    assert report["memory_gb"] == {"actor": 0.5, "update": 2.5}
    assert report["accuracy"] == {"teacher": 0.99, "student_before": 0.2, "student_after": 0.95}
    assert (report["steps"], report["tokens"], report["problems"]) == (2, 2000, 200)
    assert report["kl_loss"] == {"first": 1.0, "last": 0.5}
    assert report["staleness"] == {"mean": 0.75, "max": 2.0}
    assert report["seconds"] == {"gen": {"total": 1.0, "mean": 0.5}, "update_actor": {"total": 1.0, "mean": 0.5}}
    assert report["prepared"] == {"teacher": {"steps": 9}}
    assert report["stages"] == {"set-up": 130, "distillation": 90}
    table = render(report)
    for shown in ("99.0%", "20.0%", "95.0%", "2,000", "1.000  0.500", "0.75  2", "update_actor"):
        assert shown in table


def test_render_names_the_teacher_of_a_self_distillation() -> None:
    assert "  teacher  " in render(build_report(_results([_step(1)])))
    table = render(build_report(_results([_step(1)], teacher="teacher: the initial student, with the solution")))
    assert "teacher: the initial student, with the solution" in table


def test_build_report_resumed_run_counts_no_step_twice() -> None:
    metrics = [_step(1), _step(2), _step(2, **{"actor/kl_loss": 0.1}), {"training/global_step": 2, "val/accuracy": 1.0}]
    report = build_report(_results(metrics))
    assert (report["steps"], report["tokens"]) == (2, 2000)
    assert report["kl_loss"]["last"] == 0.1


def test_build_report_missing_metrics_are_null_and_rendered() -> None:
    report = build_report(_results([{"training/global_step": 1}]))
    assert report["tokens"] is report["kl_loss"] is report["staleness"]["mean"] is None
    assert report["seconds"] == {}
    assert "not recorded" in render(report)


@pytest.mark.parametrize("metrics", [[], [{"actor/kl_loss": 1.0}]])
def test_build_report_metrics_without_a_step_raises(metrics: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError):
        build_report(_results(metrics))


def test_build_report_evaluations_of_different_problems_raises() -> None:
    with raises(DataError, column="n"):
        build_report(_results([_step(1)], evaluations=EVALUATIONS | {"after": _evaluation(0.9, n=100)}))


def test_read_metrics_truncated_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(_step(1)) + '\n\n{"training/glob')
    with raises(DataError, file=file, line=3):
        read_metrics(file)


def test_command_writes_json_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--prepared",
        str(tmp_path),
        "--metrics",
        str(tmp_path / "m.jsonl"),
        "--stages",
        str(tmp_path / "s.jsonl"),
        "--out",
        str(tmp_path / "o" / "r.json"),
    ]
    for name, evaluation in EVALUATIONS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(evaluation))
        arguments += [f"--{name}", str(tmp_path / f"{name}.json")]
    (tmp_path / "m.jsonl").write_text(json.dumps(_step(1)) + "\n")
    (tmp_path / "s.jsonl").write_text(json.dumps(STAGES[0]) + "\n")
    assert main(arguments) == 1
    assert "made.json" in capsys.readouterr().err
    for name in ("data", "teacher", "student"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("gkd: {distill_loss_type: jsd, custom_loss: {path: null, name: null}}\n")
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "student after" in table and "loss (jsd), first and last step" in table
    report = json.loads((tmp_path / "o" / "r.json").read_text())
    assert {"python", "torch", "transformers"} <= set(report["versions"])
    assert " cores of " in report["machine"]
