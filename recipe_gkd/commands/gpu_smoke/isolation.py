"""Processes with a deadline, which end with everything that they have started."""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from recipe_gkd.runtime.process_trees import end
from teacher.common.process_id import ProcessId, process_id

RUN_VARIABLE = "RECIPE_GKD_SMOKE_RUN"
"""Environment variable of a process and of all its descendants. Its value identifies the run."""
_GRACE_S = 2.0
_KILL_TIMEOUT_S = 10.0


def run_with_deadline(
    command: Sequence[str], *, variables: Mapping[str, str], log: Path, deadline_s: float
) -> int | None:
    """Run a command, and end all processes that it has started and left.

    Descendants are found by an environment variable, because services detach themselves from their parent.

    Args:
        command: Program and arguments.
        variables: Environment variables in addition to this process's.
        log: File for its output.
        deadline_s: Time after which it is killed.

    Returns:
        Its exit status (negative: a signal), or None if it was killed at the deadline.
    """
    run = uuid.uuid4().hex
    # Temporary folders are removed with the folder of the log, even for processes that are killed.
    temporary = log.parent / "t"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "RAY_TMPDIR": tempfile.gettempdir(), "TMPDIR": str(temporary), **variables}
    environment[RUN_VARIABLE] = run
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to this process only, which then ends the others
        )
    in_time = False
    try:
        status = process.wait(deadline_s)
        in_time = True
        return status
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(processes_of(run), _GRACE_S if in_time else 0.0, _KILL_TIMEOUT_S)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_TIMEOUT_S)


def processes_of(run: str) -> list[ProcessId]:
    """Return the live processes of this user whose environment names a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{RUN_VARIABLE}={run}".encode() in (folder / "environ").read_bytes():
                identity = process_id(int(folder.name))
                found += [identity] if identity else []
    return found


def last_lines(log: Path, n: int = 15) -> list[str]:
    """Return the last lines of a log that are not empty."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line.rstrip()[:300] for line in lines if line.strip()][-n:]
