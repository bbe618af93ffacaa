"""Processes of a service that a command starts, until they serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from teacher.errors import TeacherError, TeacherSetupError
from teacher.launcher.options import ENGINE_OPTIONS
from teacher.launcher.pid_files import PidFile, write_pid_file
from teacher.launcher.settings import environment_of_processes
from teacher.launcher.stop_requests import StopRequests
from teacher.launcher.stopping import POLL_S, stop_processes


class Processes:
    """Processes of one run folder. All of them end if the command fails or gets a signal before they serve.

    Lifecycle::

        with Processes(args, run_dir) as processes:
            processes.launch("proxy", ["proxy", ...])
            processes.await_ready()

    Args:
        args: Options of the command.
        run_dir: Prepared run folder.
    """

    def __init__(self, args: Namespace, run_dir: Path) -> None:
        self._args, self._run_dir = args, run_dir
        self._files: list[PidFile] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._requests = StopRequests()

    def __enter__(self) -> Processes:
        self._requests.record()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and not self._requests.numbers:
            self._requests.restore()
            return
        try:
            stop_processes(self._files, self._args.stop_timeout_s, self._requests, self._args.report)
        except (TeacherError, OSError) as failure:
            self._args.report(str(failure))
        self._requests.ignore()
        if error[0] is None:
            self._requests.raise_if_any()

    def launch(self, name: str, arguments: Sequence[str], variables: dict[str, str] | None = None) -> None:
        """Start ``python -m teacher ARGUMENT...`` in a new session, so that it outlives this command.

        Args:
            name: Name of its files.
            arguments: Arguments of the command.
            variables: Additional environment variables.
        """
        args, log, ready = self._args, self._path(name, "log"), self._path(name, "ready")
        command = [args.python, "-m", "teacher", *arguments, "--ready-file", str(ready)]
        command += ["--log-format", args.log_format]
        command += ["--log-level", args.log_level] if args.log_level else []
        command += ["--auth-dir", args.auth_dir] if args.auth_dir else []
        for path in (ready, log):  # a symbolic link in place of the log would be followed
            path.unlink(missing_ok=True)
        with open(log, "xb") as output:
            child = subprocess.Popen(
                command,
                env=environment_of_processes() | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._children.append(child)
        path = self._path(name, "pid")
        try:
            self._files.append(write_pid_file(path, child.pid))
        except OSError:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            what = f"cannot write {path}, so {name} was stopped"
            remedy = "is the disk full? Free some space, or set RUN_DIR"
            raise TeacherSetupError(what, remedy=remedy, path=path) from None
        self._requests.raise_if_any()

    def launch_gateway(self, proxy_ip: str) -> None:
        """Start the HTTP gateway at OPENAI_PORT. It ends when the proxy of this run folder ends."""
        args = self._args
        command = ["gateway", "--server-ip", proxy_ip, "--port", str(args.proxy_frontend_port)]
        command += ["--http-port", str(args.openai_port), "--end-with", str(self._path("proxy", "pid"))]
        self.launch("gateway", command)

    def launch_workers(self, proxy_ip: str, gpus: Sequence[str]) -> None:
        """Start N_WORKERS workers, each on TP_SIZE of the GPUs if there are any."""
        args = self._args
        command = ["worker", "--server-ip", proxy_ip, "--backend-port", str(args.proxy_backend_port)]
        command += ["--stall-timeout-s", args.stall_timeout_s]
        for option in ENGINE_OPTIONS:
            name = option.name.lower()
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--sleep-mode"] if args.sleep_mode == "1" else []
        for i in range(args.n_workers):
            devices = ",".join(gpus[i * args.tp_size : (i + 1) * args.tp_size])
            self.launch(f"worker-{i}", command, {"CUDA_VISIBLE_DEVICES": devices} if devices else {})

    def await_ready(self) -> None:
        """Wait until all processes serve.

        Raises:
            TeacherError: A process has ended, or START_TIMEOUT_S is over. The end of its log is on stderr.
        """
        while waiting := [file.name for file in self._files if not file.path.with_suffix(".ready").exists()]:
            self._requests.raise_if_any()
            self._check_alive()
            if seconds_since_start() >= self._args.start_timeout_s:
                self._show_log(waiting[0])
                what = f"{' '.join(waiting)} not ready after {seconds_since_start():.0f} s"
                raise TeacherError(what, remedy=f"raise START_TIMEOUT_S, or see the logs in {self._run_dir}")
            time.sleep(POLL_S)
        self._check_alive()

    def run(self, arguments: Sequence[str]) -> None:
        """Run a command of the service to its end. A signal ends it.

        Raises:
            TeacherError: It failed; its reason is on stderr.
        """
        command = [self._args.python, "-m", "teacher", *arguments]
        child = subprocess.Popen(
            command, env=environment_of_processes(), stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while child.poll() is None:
                self._requests.raise_if_any()
                time.sleep(POLL_S)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode:
            raise TeacherError(f"`teacher {arguments[0]}` failed with status {child.returncode}")
        self._requests.raise_if_any()

    def _check_alive(self) -> None:
        for file in self._files:
            if not file.is_alive():
                self._show_log(file.name)
                log = self._path(file.name, "log")
                what = f"{file.name} ended while starting (its log is above, and in {log} until the next start)"
                raise TeacherError(what)

    def _show_log(self, name: str) -> None:
        log = self._path(name, "log")
        n_lines = os.environ.get("LOG_LINES", "")
        lines: deque[str] = deque(maxlen=int(n_lines) if n_lines.isdecimal() else 15)
        with suppress(OSError), open(log, encoding="utf-8", errors="replace") as file:
            lines.extend(file)
        with suppress(OSError):
            print(f"--- last lines of {log}", *(line.rstrip("\n") for line in lines), "---", sep="\n", file=sys.stderr)

    def _path(self, name: str, suffix: str) -> Path:
        return self._run_dir / f"{name}.{suffix}"


def seconds_since_start() -> float:
    """Return the time since this module was imported, in seconds."""
    return time.monotonic() - _STARTED


_STARTED = time.monotonic()
