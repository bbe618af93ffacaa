"""Arguments, table and JSON file of ``python -m recipe_gkd gpu_smoke``."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from recipe_gkd.commands.gpu_smoke.checks import BY_NAME, CHECKS, MACHINE, Check
from recipe_gkd.commands.gpu_smoke.machine import versions
from recipe_gkd.commands.gpu_smoke.outcome import Outcome
from recipe_gkd.commands.gpu_smoke.runner import run_check

_NAME_COLUMNS = max(map(len, BY_NAME)) + 2
_STATUS_COLUMNS = len("not possible here") + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if no check has failed, 1 after a failure, 2 for wrong arguments, 130 after Ctrl-C.
    """
    given = _parser().parse_args(argv)
    if given.list:
        print("\n".join(f"{check.name:<{_NAME_COLUMNS}}{check.title}" for check in CHECKS))
        return 0
    if unknown := [name for name in given.only or () if name not in BY_NAME]:
        print(f"error: --only: got {', '.join(unknown)}, expected names of {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    if given.json:  # before the checks, which take minutes
        try:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.touch()
        except OSError as error:
            print(f"error: --json: {given.json} cannot be written: {error}", file=sys.stderr)
            return 2
    folder = Path(mkdtemp(prefix="gkd_smoke_"))
    installed = versions()
    outcomes: list[Outcome] = []
    is_complete = False
    previous = signal.signal(signal.SIGTERM, _interrupt)  # a killed command must end the processes of its check
    try:
        print(versions_line(installed), flush=True)
        for outcome in run_checks(given.device, given.only, installed, folder):
            outcomes.append(outcome)
            print(table_row(outcome), flush=True)
        is_complete = True
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
        if given.json:
            content = report(given.device, installed, outcomes, is_complete=is_complete)
            given.json.write_text(json.dumps(content, indent=1) + "\n")
        failed = any(outcome.status == "FAILED" for outcome in outcomes)
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)
    print(summary(outcomes, folder))
    return 1 if failed else 0


def run_checks(device: str, only: Sequence[str] | None, installed: dict[str, Any], folder: Path) -> Iterator[Outcome]:
    """Run the checks one after the other, and yield their results.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        only: Names of the checks; None for all. The check of the machine runs in any case.
        installed: Versions of the packages.
        folder: Folder for files and logs.
    """
    machine = run_check(BY_NAME[MACHINE], device=device, n_gpus=0, installed=installed, folder=folder)
    yield machine
    n_gpus = len(machine.figures.get("gpus", []))
    for check in selected(only):
        yield run_check(check, device=device, n_gpus=n_gpus, installed=installed, folder=folder)


def selected(only: Sequence[str] | None) -> list[Check]:
    """Return the checks by name, without the check of the machine, in the order of :data:`CHECKS`."""
    return [check for check in CHECKS if check.name != MACHINE and (only is None or check.name in only)]


def versions_line(installed: dict[str, Any]) -> str:
    """Return the versions as text."""
    listed = ", ".join(f"{name} {version or '-'}" for name, version in installed.items())
    return textwrap.fill(listed, 120, break_on_hyphens=False)


def table_row(outcome: Outcome) -> str:
    """Return a result as a row of the table. Further lines of its detail are indented."""
    first, *rest = outcome.detail.splitlines() or [""]
    row = f"{outcome.name:<{_NAME_COLUMNS}}{outcome.status:<{_STATUS_COLUMNS}}{outcome.seconds:>6.1f} s  {first}"
    return "\n".join([row, *(f"    {line}" for line in rest)])


def summary(outcomes: Sequence[Outcome], folder: Path) -> str:
    """Return the last line: the number of checks by result, and the folder with the logs of failed ones."""
    counts = {
        status: sum(each.status == status for each in outcomes) for status in ("passed", "FAILED", "not possible here")
    }
    text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"\n{text}; logs and files are in {folder}" if counts["FAILED"] else f"\n{text}"


def report(
    device: str, installed: dict[str, Any], outcomes: Sequence[Outcome], *, is_complete: bool = True
) -> dict[str, Any]:
    """Return the content of the JSON file.

    Args:
        is_complete: False if the command was interrupted, so that it has not passed.
    """
    return {
        "passed": is_complete and bool(outcomes) and all(outcome.status != "FAILED" for outcome in outcomes),
        "complete": is_complete,
        "device": device,
        "versions": installed,
        "checks": [outcome.to_json() for outcome in outcomes],
    }


def _parser() -> argparse.ArgumentParser:
    import recipe_gkd.commands.gpu_smoke as package

    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd gpu_smoke",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device of the checks [cuda]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of the checks to run [all]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write versions, results and figures to this file")
    parser.add_argument("--list", action="store_true", help="list the names of the checks and what each shows")
    return parser


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
