"""`python -m teacher proxy|worker|check|status|keys`: one process of the service, or one question to it."""

from __future__ import annotations

import argparse
import logging
import os
import sys

import zmq

from teacher.commands import keys, queries, service
from teacher.errors import TeacherError
from teacher.logs import set_up_logging

logger = logging.getLogger("teacher")

_SERVING = ("proxy", "worker")  # these run for weeks: nobody can repeat with DEBUG what ended one of them


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done or stopped by a signal, 1 failed (the last line on stderr says why), 2 wrong arguments."""
    args = make_parser().parse_args(argv)
    set_up_logging(args.log_level, args.log_format)
    try:
        return int(args.run(args))
    except TeacherError as error:
        return _failed(args, str(error))
    except KeyboardInterrupt:
        return 130
    except (OSError, zmq.ZMQError) as error:  # what the machine refuses: files, sockets, permissions
        serves = args.command in _SERVING
        logger.log(logging.ERROR if serves else logging.DEBUG, "where the system refused", exc_info=True)
        hint = "see the traceback above" if serves else "--log-level DEBUG shows where"
        return _failed(args, f"the system refused: {type(error).__name__}: {error}; {hint}")
    except Exception:  # not to the interpreter, whose long way out would bury the reason under others' last words
        logger.exception("teacher %s failed", args.command)
        return 1


def _failed(args: argparse.Namespace, reason: str) -> int:
    """Write the reason as the last line on stderr. Returns the exit code."""
    if args.log_format == "json":
        logger.error("%s failed: %s", args.command, reason)
    else:
        print(f"teacher {args.command}: {reason}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teacher", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (service, queries, keys):
        module.add_to(commands)
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    logging.shutdown()
    # All is closed. The interpreter would take seconds more to take torch and vLLM apart.
    os._exit(code)
