"""Command `gateway`: the teacher service behind an HTTP endpoint in the format of vLLM."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from teacher.client import AsyncTeacherClient
from teacher.commands.arguments import add_command, add_service, port
from teacher.commands.processes import add_process, end_with_parent, write_ready_file
from teacher.errors import TeacherSetupError, TeacherUnavailable
from teacher.launcher.pid_files import read_pid_file
from teacher.wire.auth import is_loopback

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger("teacher")

_DRAIN_TIMEOUT_S = 2.0
"""Time for requests in flight at the end, in seconds. aiohttp waits twice, less than STOP_TIMEOUT_S in total."""
_POLL_S = 1.0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    text = "serve /v1/completions with prompt_logprobs over HTTP, for clients of vLLM, until Ctrl-C"
    parser = add_command(commands, "gateway", _run, text, log_level="INFO")
    add_service(parser, timeout_s=600.0)
    parser.add_argument("--http-port", type=port, default=8000)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen at; others than loopback need a key")
    parser.add_argument("--api-key-env", default="", help="environment variable with the key that requests need")
    parser.add_argument("--end-with", default="", metavar="FILE", help="end when the process of this pid file ends")
    add_process(parser, "file written when the HTTP port is bound")


def _run(args: argparse.Namespace) -> int:
    end_with_parent(args.end_with_parent)
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    if args.api_key_env and not key:
        raise TeacherSetupError(f"--api-key-env: the environment variable {args.api_key_env} is not set")
    if not key and not is_loopback(args.bind):
        raise TeacherSetupError(
            f"--bind {args.bind} without a key: everyone who reaches this address could use the teacher",
            remedy="set --api-key-env to an environment variable with a key, or bind to 127.0.0.1",
        )
    asyncio.run(_serve(args, key))
    return 0


async def _serve(args: argparse.Namespace, key: str) -> None:
    from aiohttp import web

    from teacher.gateway.app import Gateway

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    options = dict(timeout_s=args.timeout_s, auth_dir=args.auth_dir)
    async with AsyncTeacherClient(args.server_ip, args.port, **options) as client:
        gateway = Gateway(client, timeout_s=args.timeout_s, api_key=key)
        runner = web.AppRunner(
            gateway.application(),
            access_log=None,
            shutdown_timeout=_DRAIN_TIMEOUT_S,
            handler_cancellation=True,  # cancels the request to the service if its HTTP client has gone
        )
        await runner.setup()
        try:
            await _listen(runner, args.bind, args.http_port)
            [address] = {address[:2] for address in runner.addresses}
            logger.info("serving http://%s:%d/v1/completions, teacher at %s", *address, client.address)
            write_ready_file(args.ready_file)
            await _wait_for_end(stop, args.end_with)
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, bind: str, http_port: int) -> None:
    from aiohttp import web

    try:
        await web.TCPSite(runner, bind, http_port).start()
    except OSError as error:
        # An unknown host name has a negative number.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        in_use = "stop the process that uses the port, or " if error.errno == errno.EADDRINUSE else ""
        raise TeacherSetupError(
            f"cannot listen on {bind}:{http_port}: {reason}",
            options=("--http-port", "--bind"),
            remedy=f"{in_use}choose another with --http-port (OPENAI_PORT), or an address of this machine with --bind",
        ) from None


async def _wait_for_end(stop: asyncio.Event, pid_file: str) -> None:
    """Wait for a signal, or for the end of the process of ``pid_file``. Empty: for a signal only.

    Raises:
        TeacherUnavailable: The process has ended.
    """
    process = read_pid_file(Path(pid_file)) if pid_file else None
    while not stop.is_set():
        if process is not None and not process.is_alive():
            raise TeacherUnavailable(
                f"the {process.name} of {pid_file} has ended, and the gateway with it",
                remedy="stop the service (teacher/stop_server.sh) and start it again",
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), None if process is None else _POLL_S)
