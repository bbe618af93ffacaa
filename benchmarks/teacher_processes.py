"""The real processes of the benchmark of the teacher service, started and ended by the service's own scripts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0


class Service:
    """Proxy and workers; every process is known by the pid that the scripts wrote down."""

    def __init__(self, folder: Path, model: Path, k: int) -> None:
        self.port, self._backend_port = free_port(), free_port()
        self._first, self._second = folder / "service", folder / "joined"
        self._worker_flags = [
            *("--ckpt-path", str(model), "--dtype", "float32", "--n-logprobs", str(k)),
            *("--proxy-backend-port", str(self._backend_port)),
        ]

    def start(self) -> None:
        flags = ["--proxy-frontend-port", str(self.port), "--http-port=-1", "--run-dir", str(self._first)]
        _script("start_server.sh", *flags, *self._worker_flags)

    def join(self) -> None:
        _script("join_server.sh", "--run-dir", str(self._second), *self._worker_flags)

    def proxy_cpu_s(self) -> float:
        """What the proxy's process has used, in user and kernel."""
        fields = Path(f"/proc/{_pid(self._first / 'proxy.pid')}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill_joined(self) -> None:
        os.kill(_pid(self._second / "worker-0.pid"), signal.SIGKILL)

    def stop(self) -> None:
        for run_dir in (self._second, self._first):
            _script("stop_server.sh", "--run-dir", str(run_dir))


def _script(name: str, *flags: str) -> None:
    command = [str(REPO / "teacher" / name), *flags]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"teacher/{name} failed:\n{done.stdout}{done.stderr}")


def _pid(path: Path) -> int:
    return int(path.read_text().split()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
