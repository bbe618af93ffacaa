"""Command line of the teacher service: ``python -m teacher COMMAND``.

The commands are serve, join, stop, proxy, worker, check, status, sleep, wake, gateway and keys.

`serve`, `join` and `stop` run without the libraries of the other commands, so their modules are imported only then.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from teacher.errors import TeacherError
from teacher.launcher import commands as launcher
from teacher.logs import set_up_logging

logger = logging.getLogger("teacher")

_LONG_RUNNING_COMMANDS = ("proxy", "worker", "gateway")


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program name, by default the arguments of this process.

    Returns:
        Exit status: 0 for success or a stop by a signal, 1 for a failure with its reason in the last line on stderr,
        2 for invalid arguments, 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in launcher.COMMANDS:
        return launcher.main(arguments[0], arguments[1:])

    import zmq

    args = make_parser().parse_args(arguments)
    set_up_logging(args.log_level, args.log_format)
    try:
        return int(args.run(args))
    except TeacherError as error:
        # The output begins with the command.
        return _report_failure(args, str(error.replaced(operation="") if error.operation == args.command else error))
    except KeyboardInterrupt:
        return 130
    except (OSError, zmq.ZMQError) as error:  # refused by the system: files, sockets, permissions
        # A process that ran for weeks cannot be repeated with --log-level DEBUG, so its traceback is logged at once.
        is_long_running = args.command in _LONG_RUNNING_COMMANDS
        logger.log(logging.ERROR if is_long_running else logging.DEBUG, "system error", exc_info=True)
        hint = "see the traceback above" if is_long_running else "--log-level DEBUG shows the traceback"
        return _report_failure(args, f"the system refused: {type(error).__name__}: {error}; {hint}")
    except Exception:  # logged here, because the interpreter's exit may print messages of libraries after a traceback
        logger.exception("teacher %s failed", args.command)
        return 1


def _report_failure(args: argparse.Namespace, reason: str) -> int:
    """Write the reason as the last line on stderr and return the exit status."""
    if args.log_format == "json":
        logger.error("%s failed: %s", args.command, reason)
    else:
        print(f"teacher {args.command}: {reason}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from teacher.commands import gateway, keys, queries, service

    parser = argparse.ArgumentParser(prog="teacher", description="Teacher model as a service.")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (launcher, service, queries, gateway, keys):
        module.add_to(commands)
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)  # everything is closed; the interpreter would need seconds to unload torch and vLLM
