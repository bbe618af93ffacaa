"""Commands `check`, `status`, `sleep` and `wake`, which query or change a running service."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from teacher.client import TeacherClient
from teacher.commands.arguments import add_command, add_service, seconds
from teacher.commands.table import format_status
from teacher.errors import TeacherError
from teacher.records import TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.connection import COMMAND


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser."""
    check = add_command(
        commands, "check", _check, "send one real request; print the served model, or the error", log_level="ERROR"
    )
    add_service(check, timeout_s=10.0)
    text = "show workers, queue, clients, speed and totals; exit status 1 if there is no worker"
    status = add_command(commands, "status", _status, text, log_level="ERROR")
    add_service(status, timeout_s=5.0)
    status.add_argument("--json", action="store_true", help="print one object per line instead of a table")
    status.add_argument("--watch", type=seconds, metavar="SECONDS", help="repeat at this interval, until Ctrl-C")
    text = "finish the open requests, then release the device memory of all workers (started with --sleep-mode)"
    sleep = add_command(commands, "sleep", _sleep, text, log_level="ERROR")
    add_service(sleep, timeout_s=600.0)
    text = "restore and verify the models of all workers that sleep"
    wake = add_command(commands, "wake", _wake, text, log_level="ERROR")
    add_service(wake, timeout_s=600.0)


class CommandClient(TeacherClient):
    """Client whose errors name the flags of the commands."""

    _role = COMMAND


def _client(args: argparse.Namespace) -> TeacherClient:
    return CommandClient(args.server_ip, args.port, timeout_s=args.timeout_s, auth_dir=args.auth_dir)


def _check(args: argparse.Namespace) -> int:
    with _client(args) as client:
        info = client.hello()
        sequence = TeacherSequence(np.zeros(2, np.int32), prompt_len=1)
        (scored,) = client.submit([sequence]).result()
        print(f"{client.address} answered with {scored.topk_logps_TK.shape[1]} logprobs per position")
        for name, value in info.shown().items():
            print(f"  {name}: {value}")
    return 0


def _status(args: argparse.Namespace) -> int:
    with _client(args) as client:
        while args.watch:
            try:
                _print(client.status(args.timeout_s), client.address, args)
            except TeacherError as error:  # the service may return
                print(json.dumps({"error": str(error)}) if args.json else f"{error}\n", flush=True)
            time.sleep(args.watch)
        status = client.status(args.timeout_s)
        _print(status, client.address, args)
        return 0 if status.workers else 1


def _sleep(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with _client(args) as client:
        n_workers = client.sleep()
        print(f"{client.address}: {n_workers} workers sleep, after {time.monotonic() - began:.1f} s")
    return 0


def _wake(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with _client(args) as client:
        n_workers = client.wake()
        print(f"{client.address}: {n_workers} workers are awake and verified, after {time.monotonic() - began:.1f} s")
    return 0


def _print(status: ServiceStatus, address: str, args: argparse.Namespace) -> None:
    print(json.dumps(status.to_dict()) if args.json else f"{format_status(status, address)}\n", flush=True)
