"""Command `gateway`: the teacher service behind an HTTP endpoint in the format of vLLM."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from teacher.client import AsyncTeacherClient
from teacher.commands.arguments import add_command, add_service, port
from teacher.errors import TeacherSetupError
from teacher.wire.auth import is_loopback


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    text = "serve /v1/completions with prompt_logprobs over HTTP, for clients of vLLM, until Ctrl-C"
    parser = add_command(commands, "gateway", _run, text)
    add_service(parser, timeout_s=600.0)
    parser.add_argument("--http-port", type=port, default=8000)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen at; others than loopback need a key")
    parser.add_argument("--api-key-env", default="", help="environment variable with the key that requests need")


def _run(args: argparse.Namespace) -> int:
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
        runner = web.AppRunner(gateway.application(), access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, args.bind, args.http_port)
            await site.start()
            [address] = {address[:2] for address in runner.addresses}
            print(f"http://{address[0]}:{address[1]}/v1/completions, teacher at {client.address}", flush=True)
            await stop.wait()
        finally:
            await runner.cleanup()
