"""Last message and exit status of the training command."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress

from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import UnexpectedError
from recipe_gkd.runtime.run_log import log_to_file

SAVED_AND_STOPPED = os.EX_TEMPFAIL
"""Exit status 75: the run has saved a checkpoint before its last step. The same command continues it."""


def report_error(error: Exception, hint: str = "") -> int:
    """Print an error without a traceback. The traceback of an unexpected one goes to ``run.log`` if that is open.

    Args:
        error: Error that ends the command.
        hint: Clause about the newest checkpoint. Empty if the run had not started.

    Returns:
        Exit status.
    """
    known = as_known_error(error, "outside the training")
    details = ""
    if isinstance(known, UnexpectedError):
        if file := log_to_file("the run ends with an unexpected error", known):
            details = f"\nthe traceback is in {file}"
        else:
            details = "\n" + "".join(traceback.format_exception(known)).rstrip()
    with suppress(OSError):  # the terminal may be gone
        print(f"\nerror: {known}{details}" + (f"\n{hint}" if hint else ""), file=sys.stderr)
    return 1


def report_stop(event: str, number: int, hint: str = "") -> int:
    """Print that a signal ended the run.

    Args:
        event: Participle for the signal, such as ``"interrupted"``.
        number: Number of the signal.
        hint: Clause about the newest checkpoint. Empty if the run had not started.

    Returns:
        Exit status.
    """
    _print_end(f"{event}; {hint}" if hint else event)
    return 128 + number


def report_saved_stop(reason: str, hint: str) -> int:
    """Print that the run ended between two steps as requested.

    Args:
        reason: Cause of the request, such as ``"SIGTERM"``.
        hint: Clause about the newest checkpoint.

    Returns:
        Exit status.
    """
    _print_end(f"ended before the last step ({reason}); {hint}")
    return SAVED_AND_STOPPED


def leave_dead_streams() -> None:
    """Point stdout and stderr to ``/dev/null`` if their terminal or reader is gone.

    Otherwise Python's flush at the exit would fail, and change the exit status to 120.
    """
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), number)


def _print_end(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"\n{text}", file=sys.stderr)
