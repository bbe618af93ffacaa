"""One check in a separate process."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe_gkd.commands.gpu_smoke.checks import Check
from recipe_gkd.commands.gpu_smoke.isolation import last_lines, run_with_deadline
from recipe_gkd.commands.gpu_smoke.outcome import Outcome

_CHILD = "recipe_gkd.commands.gpu_smoke.child"


def run_check(
    check: Check, *, device: str, n_gpus: int, installed: dict[str, Any], folder: Path, deadline_s: float | None = None
) -> Outcome:
    """Run a check in its process, if it is possible on this machine.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        installed: Versions of the packages; see :meth:`Check.obstacle`.
        folder: Existing folder for files and the log ``NAME.log``.
        deadline_s: Deadline; None for the deadline of the check.
    """
    if obstacle := check.obstacle(device, n_gpus, installed):
        return Outcome(name=check.name, status="not possible here", detail=obstacle)
    deadline_s = deadline_s or check.deadline(device)
    files, log, result = folder / check.name, folder / f"{check.name}.log", folder / f"{check.name}.json"
    files.mkdir()
    context = {"device": device, "n_gpus": n_gpus, "folder": str(files), "deadline_s": deadline_s}
    command = [sys.executable, "-m", _CHILD, check.name, json.dumps(context), str(result)]
    started = time.monotonic()
    status = run_with_deadline(command, variables=check.variables(device), log=log, deadline_s=deadline_s)
    seconds = time.monotonic() - started
    if result.exists():
        outcome = Outcome(name=check.name, seconds=seconds, **json.loads(result.read_text()))
        if outcome.status != "passed" or status == 0:
            return outcome
        reason = f"did not end within {deadline_s:g} s" if status is None else f"ended with {_ending(status)}"
        detail = f"all comparisons passed, but the process {reason}"
        return replace(outcome, status="FAILED", detail=detail)
    reason = f"no result within {deadline_s:g} s" if status is None else f"the process ended with {_ending(status)}"
    detail = "\n".join([f"{reason}; the end of its log:", *last_lines(log)])
    return Outcome(name=check.name, status="FAILED", detail=detail, seconds=seconds)


def _ending(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
