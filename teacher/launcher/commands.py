"""Commands `serve`, `join` and `stop`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from teacher.errors import TeacherError, TeacherSetupError
from teacher.launcher.options import JOIN_OPTIONS, SERVE_OPTIONS, STOP_OPTIONS, Option, help_of, parse_options
from teacher.launcher.pid_files import HOST, read_pid_files
from teacher.launcher.processes import Processes, seconds_since_start
from teacher.launcher.run_dir import STOP_SCRIPT, prepared_run_dir
from teacher.launcher.settings import check_port_is_free, check_settings, connect_address, require
from teacher.launcher.stop_requests import SIGNALS, Interrupted, StopRequests
from teacher.launcher.stopping import stop_processes

SCRIPT_VARIABLE = "TEACHER_SCRIPT"
"""Environment variable with the name of the script that runs the command, for messages."""


class Command(NamedTuple):
    """Command: its function, its help in one line, its help, and its options."""

    run: Callable[[Namespace], int]
    text: str
    usage: str
    options: Sequence[Option]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the list of a parser. ``main`` parses their arguments."""
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.text)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run a command of ``COMMANDS``.

    Returns:
        Exit status: 0 for success, 1 for a failure with its reason in the last line on stderr, 128 + N for signal N.
    """
    command, caller = COMMANDS[name], os.environ.pop(SCRIPT_VARIABLE, f"teacher {name}")

    def report(line: str) -> None:
        with suppress(OSError):  # the terminal may be closed
            print(f"{caller}: {line}", file=sys.stderr, flush=True)

    if {"-h", "--help"} & set(arguments):
        print(f"Usage: {command.usage}\n\n{help_of(command.options)}")
        return 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the scripts block them until Python has started
        args = parse_options(command.options, arguments)
        args.report = report
        return command.run(args)
    except Interrupted as interrupted:
        return interrupted.status
    except KeyboardInterrupt:  # before the first process
        return 130
    except TeacherError as error:
        report(str(error))
    except OSError as error:
        report(f"the system refused: {type(error).__name__}: {error}")
    return 1


def _check_ports(args: Namespace, ip: str) -> None:
    """Check that the ports of the service differ and are free."""
    ports = (args.proxy_frontend_port, args.proxy_backend_port)
    for port in ports:
        check_port_is_free(ip, port, ("PROXY_FRONTEND_PORT", "PROXY_BACKEND_PORT"))
    if args.openai_port in ports:
        name = "PROXY_FRONTEND_PORT" if args.openai_port == ports[0] else "PROXY_BACKEND_PORT"
        what = f"OPENAI_PORT={args.openai_port} is {name} too, expected another port"
        raise TeacherSetupError(what, options=("OPENAI_PORT", name))
    if args.openai_port:
        check_port_is_free("127.0.0.1", args.openai_port, ("OPENAI_PORT",))


def serve(args: Namespace) -> int:
    """Start a proxy, its workers and the gateway of OPENAI_PORT. Return once the service answers a real request."""
    require("TRUSTED_NETWORK", args.trusted_network, ("0", "1"))
    gpus = check_settings(args)
    # Workers of this machine and the final check connect to the interface of the proxy.
    ip = connect_address(args.bind)
    _check_ports(args, ip)
    folder = _run_dir(args, f"teacher-{HOST}-{args.proxy_frontend_port}")
    service = ["--server-ip", ip, "--port", str(args.proxy_frontend_port)]
    service += ["--auth-dir", args.auth_dir] if args.auth_dir else []
    with prepared_run_dir(folder, args.report) as run_dir, Processes(args, run_dir) as processes:
        # The proxy first: it fails at once if its ports, keys or interface cannot be used.
        processes.launch("proxy", _proxy_command(args))
        processes.await_ready()
        if args.openai_port:
            processes.launch_gateway(ip)
        processes.launch_workers(ip, gpus)
        processes.await_ready()
        processes.run(["check", *service, "--timeout-s", "60"])
    print(f"teacher service ready after {seconds_since_start():.0f} s; logs in {run_dir}")
    if args.openai_port:
        print(f"scores over HTTP: http://127.0.0.1:{args.openai_port}/v1/completions")
    print(f"show its status with: {args.python} -m teacher status {' '.join(service)}")
    print(f"stop it with: {STOP_SCRIPT} --run-dir {run_dir}")
    return 0


def join(args: Namespace) -> int:
    """Start workers for the proxy of a running service, and return once it has accepted them all."""
    gpus = check_settings(args)
    default = f"teacher-join-{HOST}-{args.server_ip}-{args.proxy_backend_port}"
    with prepared_run_dir(_run_dir(args, default), args.report) as run_dir, Processes(args, run_dir) as processes:
        processes.launch_workers(args.server_ip, gpus)
        processes.await_ready()
    address = f"{args.server_ip}:{args.proxy_backend_port}"
    print(f"{args.n_workers} workers joined {address} after {seconds_since_start():.0f} s; logs in {run_dir}")
    print(f"stop them with: {STOP_SCRIPT} --run-dir {run_dir}")
    return 0


def stop(args: Namespace) -> int:
    """Stop the processes of a run folder that this host started, and no others."""
    requests = StopRequests()
    requests.ignore()  # a signal before `stop_processes` would leave all processes running
    run_dir = _run_dir(args, f"teacher-{HOST}-{args.proxy_frontend_port}")
    ours, foreign = read_pid_files(run_dir)
    if not ours and not foreign:
        print(f"nothing to stop: no process is recorded in {run_dir} (set --run-dir if another folder was used)")
        return 0
    requests.record((signal.SIGINT, signal.SIGTERM), also_ignored=True)  # not SIGHUP, which nohup ignores
    stop_processes(ours, args.stop_timeout_s, requests, args.report)
    requests.ignore()
    for file in foreign:
        args.report(f"left alone: {file.path}: {file.foreign}")
    if foreign:
        what = f"stopped {len(ours)} processes of this host, and left {len(foreign)} pid files alone"
        raise TeacherError(what, remedy="see above")
    print(f"stopped; logs are kept in {run_dir}")
    return 0


def _proxy_command(args: Namespace) -> list[str]:
    command = ["proxy", "--bind", args.bind, "--http-bind", args.http_bind]
    command += ["--frontend-port", str(args.proxy_frontend_port), "--backend-port", str(args.proxy_backend_port)]
    command += ["--max-queue-tokens", str(args.max_queue_tokens), "--stall-timeout-s", args.stall_timeout_s]
    command += ["--http-port", args.http_port] if args.http_port else []
    command += ["--trusted-network"] if args.trusted_network == "1" else []
    return command + (["--io-threads", args.proxy_io_threads] if args.proxy_io_threads else [])


def _run_dir(args: Namespace, default: str) -> Path:
    return Path(args.run_dir) if args.run_dir else Path.cwd() / "outputs" / default


_SERVE_USAGE = """\
CKPT_PATH=/models/teacher teacher/start_server.sh [--option value ...]

Starts a proxy and its workers in the background and returns 0 once the service has answered a real request.
If a process ends before that, prints the end of its log, stops the others and returns 1."""
_JOIN_USAGE = """\
SERVER_IP=10.0.0.1 CKPT_PATH=/models/teacher teacher/join_server.sh [--option value ...]

Starts N_WORKERS workers for the proxy at SERVER_IP:PROXY_BACKEND_PORT and returns 0 once it has accepted them all.
They must serve the same model with the same N_LOGPROBS and MAX_MODEL_LEN as the existing workers. If the service uses
keys, AUTH_DIR is a copy of its AUTH_DIR/clients/NAME, or its AUTH_DIR."""
_STOP_USAGE = """\
teacher/stop_server.sh [--option value ...]

Sends SIGTERM to each process of the run folder, waits, and kills the remaining ones. A pid that now belongs to another
process is left alone. Processes of other hosts and unreadable pid files are reported, and the exit status is 1. Returns
0 if no process of the folder runs afterwards, even if none ran before."""

COMMANDS = {
    "serve": Command(serve, "start a proxy and workers, and return (start_server.sh)", _SERVE_USAGE, SERVE_OPTIONS),
    "join": Command(join, "start more workers for a running proxy (join_server.sh)", _JOIN_USAGE, JOIN_OPTIONS),
    "stop": Command(stop, "stop what serve or join started (stop_server.sh)", _STOP_USAGE, STOP_OPTIONS),
}
