r"""Report of a quickstart run: ``report.json`` and a printed table.

Usage::

    python -m recipe_gkd.quickstart.report outputs/quickstart/runs/quickstart --prepared outputs/quickstart \
        --teacher before.json --before before.json --after after.json --stages stages.jsonl --out report.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from recipe_gkd.addition.task import DATA_SOURCE
from recipe_gkd.commands.gpu_smoke.machine import versions
from recipe_gkd.commands.report.run_files import Run, read_run
from recipe_gkd.commands.report.series import Floats
from recipe_gkd.config.objective import loss_name
from recipe_gkd.errors import DataError, GkdError
from recipe_gkd.quickstart.explanations import FIGURES, TIMINGS
from recipe_gkd.quickstart.models import FAMILY_RECIPES, select_recipes
from recipe_gkd.quickstart.prepare import RECORD
from recipe_gkd.runtime.closed_output import run_until_closed
from teacher.common.sizes import GIB

Json = dict[str, Any]
TOKENS, LOSS = "perf/total_num_tokens", "actor/kl_loss"
STALENESS_MEAN, STALENESS_MAX = "training/staleness_mean", "training/staleness_max"
RESPONSE_LENGTH, TIMING_PREFIX = "response_seq_len/average", "timing/"
ACTOR_MEMORY, MEMORY_PREFIX = "perf/max_memory_allocated_gb", "perf/memory_gb/"


def read_accuracies(files: Mapping[str, Path]) -> tuple[int, dict[str, float]]:
    """Return the number of problems, and the share of exact answers of each model.

    Args:
        files: ``"teacher"``, ``"student_before"`` and ``"student_after"`` -> file of ``recipe_gkd evaluate --json``.
            Of a file with both models the teacher is the first one.

    Raises:
        DataError: A file is not a result of the command, or the models answered different problems.
    """
    found: dict[str, float] = {}
    problems: dict[str, tuple[int, str]] = {}
    for name, path in files.items():
        result = _read_json(path)
        try:
            score = result["models"][0 if name == "teacher" else -1]["scores"][DATA_SOURCE]
            found[name], problems[name] = float(score["mean"]), (score["n_prompts"], result["data"])
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{path} has no result of the quickstart's problems ({type(error).__name__}: {error})",
                remedy=f"create it with python -m recipe_gkd evaluate --json {path}",
                file=path,
            ) from error
    for name, (n, data) in problems.items():
        if (n, data) != problems["teacher"]:
            other_n, other_data = problems["teacher"]
            raise DataError(
                f"{files[name]} is about {n} problems of {data}, the teacher's about {other_n} of {other_data}",
                remedy="evaluate all models with the same --data",
                file=files[name],
            )
    return problems["teacher"][0], found


def summarize(run: Run) -> Json:
    """Return the entries of the report about the training steps. A metric that the run lacks is None.

    Raises:
        DataError: The configuration of the run cannot be read.
    """
    tokens, mean_lags, max_lags = (_column(run, name) for name in (TOKENS, STALENESS_MEAN, STALENESS_MAX))
    seconds = {name.removeprefix(TIMING_PREFIX): _column(run, name) for name in _names(run, TIMING_PREFIX)}
    memory = {"actor": _column(run, ACTOR_MEMORY)}
    memory |= {name.removeprefix(MEMORY_PREFIX): _column(run, name) for name in _names(run, MEMORY_PREFIX)}
    if not isinstance(gkd := run.setting("gkd"), dict):
        raise DataError(
            f"{run.folder} has no usable configuration", remedy="repeat the run with --fresh", file=run.folder
        )
    return {
        "loss": str(loss_name(gkd)),
        "steps": len({step for series in run.series.values() for step in series.steps.tolist() if step > 0}),
        "tokens": int(tokens.sum()) if len(tokens) else None,
        "kl_loss": _first_and_last(_column(run, LOSS)),
        "response_length": _first_and_last(_column(run, RESPONSE_LENGTH)),
        "staleness": {
            "mean": float(mean_lags.mean()) if len(mean_lags) else None,
            "max": float(max_lags.max()) if len(max_lags) else None,
        },
        "seconds": {
            name: {"total": float(values.sum()), "mean": float(values.mean())}
            for name, values in seconds.items()
            if len(values)
        },
        "memory_gb": {name: float(values.max()) for name, values in memory.items() if len(values)},
    }


def _names(run: Run, prefix: str) -> list[str]:
    return sorted(name for name in run.series if name.startswith(prefix))


def _column(run: Run, name: str) -> Floats:
    """Return the values of a metric, without the validation before the training."""
    series = run.series.get(name)
    return np.empty(0) if series is None else series.values[series.steps > 0]


def _first_and_last(values: Floats) -> dict[str, float] | None:
    return {"first": float(values[0]), "last": float(values[-1])} if len(values) else None


def render(report: Mapping[str, Any]) -> str:
    """Return the table that the quickstart prints at its end."""
    accuracy, staleness, loss = report["accuracy"], report["staleness"], report["kl_loss"]
    values = "not recorded" if loss is None else f"{loss['first']:.3f}  {loss['last']:.3f}"
    lag = f"{_number(staleness['mean'], '.2f')}  {_number(staleness['max'], '.0f')}"
    rows = [
        (f"exact answers, {report['problems']} held-out problems", "", ""),
        (f"  {report['teacher']}", f"{accuracy['teacher']:.1%}", FIGURES["teacher"]),
        ("  student before", f"{accuracy['student_before']:.1%}", FIGURES["student before"]),
        ("  student after", f"{accuracy['student_after']:.1%}", FIGURES["student after"]),
        ("training steps", f"{report['steps']}", FIGURES["training steps"]),
        ("tokens", _number(report["tokens"], ","), FIGURES["tokens"]),
        (f"loss ({report['loss']}), first and last step", values, FIGURES["loss"]),
        ("staleness in steps, mean and largest", lag, FIGURES["staleness"]),
    ]
    if report["seconds"]:
        rows.append(("seconds of the training", "total    a step", "stages overlap, so their times do not add up"))
        rows += [
            (f"  {name}", f"{timing['total']:.1f}  {timing['mean']:8.3f}", TIMINGS.get(name, ""))
            for name, timing in sorted(report["seconds"].items(), key=lambda item: -item[1]["total"])
        ]
    if report["memory_gb"]:
        rows.append(("peak memory in GiB", "", FIGURES["memory"]))
        rows += [(f"  {name}", f"{peak:.2f}", "") for name, peak in report["memory_gb"].items()]
    if report["stages"]:
        rows.append(("seconds of this start", "", FIGURES["stages"]))
        rows += [(f"  {name}", f"{seconds:.0f}", "") for name, seconds in report["stages"].items()]
    rows.append(("versions", "", ""))
    rows += [(f"  {name}", version, "") for name, version in report["versions"].items()]
    width, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    return "\n".join(f"{left:<{width}}  {value:>{right}}  {meaning}".rstrip() for left, value, meaning in rows)


def _number(value: float | None, spec: str) -> str:
    return "not recorded" if value is None else format(value, spec)


def machine_description() -> str:
    """Return the processor, the number of cores that this process may use, and the size of the memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    n_cores = len(os.sched_getaffinity(0))
    return f"{n_cores} cores of {model}, {psutil.virtual_memory().total / GIB:.0f} GiB"


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.quickstart.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("--prepared", type=Path, required=True, help="output folder of recipe_gkd.quickstart.prepare")
    models = {"teacher": "teacher", "before": "student before the training", "after": "student after the training"}
    for name, model in models.items():
        add(f"--{name}", type=Path, required=True, help=f"evaluation of the {model}, as JSON")
    add("--stages", type=Path, required=True, help="seconds of each stage, one JSON object per line")
    add("--out", type=Path, required=True, help="output file")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--self", action="store_true", dest="for_self", help="the run is a self-distillation")
    kinds.add_argument("--family", choices=FAMILY_RECIPES, help="the student is of this family")
    args = parser.parse_args(argv)
    roles = select_recipes(for_self=args.for_self, family=args.family)
    try:
        n_problems, accuracy = read_accuracies(
            {"teacher": args.teacher, "student_before": args.before, "student_after": args.after}
        )
        stages = [_parse(line, args.stages) for line in _read(args.stages).splitlines()]
        report = {
            "problems": n_problems,
            "accuracy": accuracy,
            **summarize(read_run(args.run)),
            "stages": {stage["stage"]: stage["seconds"] for stage in stages},
            "prepared": {name: _read_json(args.prepared / name / RECORD) for name in ("data", *roles)},
            "versions": {"python": platform.python_version(), **{k: v for k, v in versions().items() if v}},
            "machine": machine_description(),
            "teacher": "teacher: the initial student, with the solution" if args.for_self else "teacher",
        }
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(render(report))
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        remedy = "check the path and the output of the previous stage"
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy=remedy, file=path) from error


def _read_json(path: Path) -> Json:
    return _parse(_read(path), path)


def _parse(text: str, path: Path) -> Json:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} has no valid JSON ({error})", remedy="create it again", file=path) from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a JSON {type(value).__name__}, expected an object", file=path)
    return value


if __name__ == "__main__":
    sys.exit(run_until_closed(main))
