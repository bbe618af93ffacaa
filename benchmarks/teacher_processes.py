"""Processes of the teacher service benchmark, started and stopped by the service's own scripts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0
START_TIMEOUT_S = 1800.0
"""Deadline of a start. On a GPU vLLM compiles kernels at the first one."""
_STOP_TIMEOUT_S = 60.0


class Service:
    """A proxy and its workers. Their pids are read from the run folders.

    Attributes:
        port: Frontend port.
    """

    def __init__(self, folder: Path, model: Path, k: int, dtype: str = "float32") -> None:
        """Choose free ports.

        Args:
            folder: Parent of the run folders.
            model: Folder of the model.
            k: Log-probabilities per position.
            dtype: Data type of the model.
        """
        self.port, self._backend_port = free_port(), free_port()
        self._service_dir, self._joined_dir = folder / "service", folder / "joined"
        self._worker_flags = [
            *("--ckpt-path", str(model), "--dtype", dtype, "--n-logprobs", str(k)),
            *("--proxy-backend-port", str(self._backend_port)),
        ]

    def start(self) -> None:
        """Start the proxy and one worker."""
        flags = ["--proxy-frontend-port", str(self.port), "--http-port=-1", "--run-dir", str(self._service_dir)]
        _script("start_server.sh", *flags, *self._worker_flags)

    def join(self) -> None:
        """Start a second worker."""
        _script("join_server.sh", "--run-dir", str(self._joined_dir), *self._worker_flags)

    def proxy_cpu_s(self) -> float:
        """Return the CPU time of the proxy in user and kernel mode, in seconds."""
        fields = Path(f"/proc/{_pid(self._service_dir / 'proxy.pid')}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill_joined(self) -> None:
        """Kill the second worker."""
        os.kill(_pid(self._joined_dir / "worker-0.pid"), signal.SIGKILL)

    def stop(self) -> None:
        """Stop all processes."""
        for run_dir in (self._joined_dir, self._service_dir):
            _script("stop_server.sh", "--run-dir", str(run_dir))


def _script(name: str, *flags: str) -> None:
    command = [str(REPO / "teacher" / name), *flags]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command,
        env=environment,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S + _STOP_TIMEOUT_S,  # the scripts have their own deadlines, and then stop processes
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"teacher/{name} failed:\n{done.stdout}{done.stderr}")


def _pid(path: Path) -> int:
    return int(path.read_text().split()[0])


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
