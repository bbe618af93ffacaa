"""Last message and exit status of the training command."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress

from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import UnexpectedError
from recipe_gkd.runtime.run_log import log_to_file


def report_error(error: Exception) -> int:
    """Print an error without a traceback. The traceback of an unexpected one goes to ``run.log`` if that is open.

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
        print(f"\nerror: {known}{details}", file=sys.stderr)
    return 1


def report_stop(event: str, number: int) -> int:
    """Print that a signal ended the run.

    Args:
        event: Participle for the signal, such as ``"interrupted"``.
        number: Number of the signal.

    Returns:
        Exit status.
    """
    with suppress(OSError):  # the terminal may be gone
        print(f"\n{event}; complete checkpoints are kept", file=sys.stderr)
    return 128 + number
