"""Markdown table of finished quickstart runs: accuracy, time and memory.

Usage::

    python -m recipe_gkd.quickstart.table --run one_step_off=outputs/quickstart/runs/quickstart [--run NAME=FOLDER ...]

``bash launch/quickstart_table.sh`` does the runs of the table in docs/performance.md and prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe_gkd.errors import DataError, GkdError
from recipe_gkd.runtime.closed_output import run_until_closed

Json = dict[str, Any]
MEMORY = ("actor", "generate", "update", "sync")
HEADER = (
    "mode", "before", "after", "teacher", "steps", "seconds of the run", "of its steps", "per update",
    "GiB: actor", *MEMORY[1:],
)  # fmt: skip
MISSING = "-"


def read_reports(folders: Mapping[str, Path]) -> dict[str, Json]:
    """Return the report of each run.

    Raises:
        DataError: A folder has no complete report.
    """
    reports = {}
    for name, folder in folders.items():
        try:
            reports[name] = json.loads((folder / "report.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(
                f"{name}: {folder} has no complete report.json ({error})",
                remedy="finish the run with launch/quickstart.sh",
                file=folder / "report.json",
            ) from error
    return reports


def render_table(reports: Mapping[str, Json]) -> str:
    """Return a Markdown table with one row for each run, and the machines below it.

    The columns are the accuracy of the student before and after, and of the teacher; seconds of the training command,
    of its steps, and of one update; and the peak
    memory of the largest actor process, and of a slot in each phase of the hybrid engine.

    Raises:
        DataError: A report lacks an entry; another version of this project wrote it.
    """
    rows = [_row(name, report) for name, report in reports.items()]
    machines = dict.fromkeys(report.get("machine", "") for report in reports.values())
    lines = [_line(HEADER), _line(["---"] * len(HEADER)), *map(_line, rows), "", *filter(None, machines)]
    return "\n".join(lines)


def _row(name: str, report: Json) -> list[str]:
    try:
        accuracy, seconds, memory = report["accuracy"], report["seconds"], report["memory_gb"]
        shares = [f"{accuracy[model]:.1%}" for model in ("student_before", "student_after", "teacher")]
        times = [
            _number(report["stages"].get("distillation"), ".0f"),
            _number(seconds.get("step", {}).get("total"), ".1f"),
            _number(seconds.get("update_actor", {}).get("mean"), ".3f"),
        ]
        peaks = [_number(memory.get(part), ".2f") for part in MEMORY]
        return [name, *shares, str(report["steps"]), *times, *peaks]
    except (KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{name}: its report.json has no usable entry {error}",
            remedy="repeat the run with launch/quickstart.sh --fresh",
            column=str(error.args[0]) if isinstance(error, KeyError) else "",
        ) from error


def _number(value: float | None, spec: str) -> str:
    return MISSING if value is None else format(value, spec)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.quickstart.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", action="append", required=True, metavar="NAME=FOLDER", help="a finished run")
    folders = {}
    for run in parser.parse_args(argv).run:
        name, separator, folder = run.partition("=")
        if not (name and separator and folder):
            parser.error(f"--run: got {run!r}, expected NAME=FOLDER")
        folders[name] = Path(folder)
    try:
        print(render_table(read_reports(folders)))
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_until_closed(main))
