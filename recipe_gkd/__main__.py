"""Dispatch ``python -m recipe_gkd <command> ...`` to the modules of :mod:`recipe_gkd.commands`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Name of each command -> its module in recipe_gkd.commands, which defines main(argv), and its help in one line.
COMMANDS = {
    "check-devices": ("check_devices", "check every node, and show which devices each worker would get"),
    "gpu_smoke": ("gpu_smoke", "check the main parts on this machine's GPUs, with tiny models"),
}
PROGRAM = "python -m recipe_gkd"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Name of the command and its arguments. None: those of this process.

    Returns:
        Exit status of the command, or 2 if no known command was given.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"error: unknown command {command!r}; expected one of the commands below\n\n{usage()}", file=sys.stderr)
        return 2
    module_name, _ = COMMANDS[command]
    module = importlib.import_module(f"recipe_gkd.commands.{module_name}")
    return int(module.main(rest))


def usage() -> str:
    """Return the list of all commands with their help."""
    width = max(map(len, COMMANDS)) + 2
    rows = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    lines = [f"usage: {PROGRAM} COMMAND [--help] [key=value ...]", "", "commands:", *rows, ""]
    return "\n".join([*lines, "Training has a module of its own: python -m recipe_gkd.main_gkd --help"])


if __name__ == "__main__":
    sys.exit(main())
