"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from teacher.wire.sockets import FRONTEND_PORT


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    log_level: str = "WARNING",
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: Subparsers of the main parser.
        name: Name of the command.
        run: Function that runs the command and returns its exit status.
        text: Help text.
        log_level: Default of ``--log-level``.
    """
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
    parser.set_defaults(run=run)
    parser.add_argument("--log-level", default=log_level, choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    parser.add_argument("--log-format", default="text", choices=["text", "json"], help="json: one object per line")
    return parser


def add_auth_dir(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--auth-dir`` with a help text."""
    parser.add_argument("--auth-dir", default="", help=f"{text}; created by `python -m teacher keys`")


def add_service(parser: argparse.ArgumentParser, *, timeout_s: float) -> None:
    """Add address, keys and time limit of the service to query."""
    parser.add_argument("--server-ip", default="127.0.0.1")
    # argparse converts a default that is text, so that a wrong value is reported like a wrong flag.
    default_port = os.environ.get("PROXY_FRONTEND_PORT") or str(FRONTEND_PORT)
    text = "the proxy's port for clients; PROXY_FRONTEND_PORT, if set, is the default"
    parser.add_argument("--port", type=port, default=default_port, help=text)
    add_auth_dir(parser, "keys of a client, for a service with keys")
    parser.add_argument("--timeout-s", type=seconds, default=timeout_s)


def port(text: str) -> int:
    """Return a port number. 0 selects any free port."""
    if not 0 <= (number := int(text)) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 0 (any) to 65535, got {number}")
    return number


def positive(text: str) -> int:
    """Return a positive integer."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def seconds(text: str) -> float:
    """Return a positive duration in seconds."""
    if not 0 < (value := float(text)) <= 1e6:  # false for NaN
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return value
