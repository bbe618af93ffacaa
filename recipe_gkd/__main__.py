"""Dispatch ``python -m recipe_gkd <command> ...`` to the modules of :mod:`recipe_gkd.commands`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from recipe_gkd.runtime.closed_output import run_until_closed

# Name of each command -> its module in recipe_gkd.commands, which defines main(argv), and its help in one line.
COMMANDS = {
    "check-config": ("check_config", "validate a configuration without starting anything"),
    "check-devices": ("check_devices", "check every node, and show which devices each worker would get"),
    "doctor": ("doctor", "check that a run can work here, and print a remedy for each problem"),
    "plan": ("plan", "compute memory and traffic of a run, and the smallest change that makes it fit"),
    "report": ("report", "write one HTML page about a run: curves, time per stage, advice, responses"),
    "export": ("export", "write a checkpoint as a Hugging Face folder"),
    "evaluate": ("evaluate", "generate with vLLM, score with a reward function, and compare models"),
    "chat": ("chat", "talk to a student, and compare its responses with a teacher's"),
    "record": ("record", "record a teacher's scores of reference responses, for training without a teacher"),
    "data": ("data", "data inspect FILE: show it as a run would read it; data prepare: convert raw files"),
    "gpu_smoke": ("gpu_smoke", "check the main parts on this machine's GPUs, with tiny models"),
}
PROGRAM = "python -m recipe_gkd"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Name of the command and its arguments. None: the arguments of this process.

    Returns:
        Exit status of the command, or 2 if no known command was given. 141 if the reader closed the output earlier.
    """
    return run_until_closed(lambda: _dispatch(argv))


def _dispatch(argv: Sequence[str] | None) -> int:
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
    return "\n".join([*lines, "Training has a separate module: python -m recipe_gkd.main_gkd --help"])


if __name__ == "__main__":
    sys.exit(main())
