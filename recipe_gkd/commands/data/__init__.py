"""Command ``data``: ``inspect`` a file as a run would read it, and ``prepare`` raw files."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recipe_gkd.commands.data import inspect, prepare

ACTIONS = {"inspect": inspect, "prepare": prepare}
EXPECTED = "expected: data inspect FILE [key=value ...], or data prepare FORMAT FILE ... --output FOLDER"


def main(argv: Sequence[str] | None = None) -> int:
    """Run an action of the command.

    Returns:
        Exit status: 0 after success, 1 after an error, 2 if no known action was given.
    """
    arguments = list(sys.argv[2:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print("\n\n".join(action.make_parser().format_help() for action in ACTIONS.values()))
        raise SystemExit(0)  # as argparse does
    if not arguments or arguments[0] not in ACTIONS:
        print(f"error: got {' '.join(arguments)!r}; {EXPECTED}", file=sys.stderr)
        return 2
    return ACTIONS[arguments[0]].main(arguments[1:])
