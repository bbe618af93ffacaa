"""Command that checks this machine before a worker starts on it. The start scripts run it.

Usage::

    python -m teacher.machine_checks [cpu | cuda | auto]

It prints one line per problem and returns 1 if there is one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

from teacher.common.machine_checks import driver_release, find_problems


def main(arguments: Sequence[str]) -> int:
    """Print the problems of this machine. Return 1 if there are any."""
    device = arguments[0] if arguments else "auto"
    if device not in ("cpu", "cuda", "auto"):
        print(f"expected cpu, cuda or auto, got {device!r}", file=sys.stderr)
        return 2
    if device == "auto":
        device = "cpu" if driver_release() is None else "cuda"
    problems = find_problems(device, {"temporary files": tempfile.gettempdir()})
    for problem in problems:
        print(f"{os.uname().nodename}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
