"""Output of commands that another program may stop reading, such as ``head``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def print_lines(lines: Iterable[str]) -> None:
    """Print lines until the reader of the output closes it, which is no error."""
    try:
        for line in lines:
            print(line)
    except BrokenPipeError:
        _discard_output()
    flush_output()


def flush_output() -> None:
    """Write what is buffered. That the reader has closed the output is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Discard all further output, also what Python writes when it exits."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
