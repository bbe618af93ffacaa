"""A teacher service of one worker, started and stopped by its scripts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import teacher
from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed
from recipe_gkd.commands.gpu_smoke.tiny_models import engine_dtype

TOP_K = 16
_SCRIPTS = Path(teacher.__file__).parent
_STOP_TIMEOUT_S = 60.0


@contextmanager
def running_service(model: Path, run_dir: Path, *, device: str, timeout_s: float, **settings: object) -> Iterator[int]:
    """Start a service of a tiny model, yield its port, and stop it.

    Args:
        model: Hugging Face folder.
        run_dir: Folder for pids and logs.
        device: ``"cuda"`` or ``"cpu"``.
        timeout_s: Deadline of the start.
        **settings: Further environment variables of ``teacher/start_server.sh``.

    Raises:
        CheckFailed: The service did not start.
    """
    port, backend_port = _free_port(), _free_port()
    variables = {
        "CKPT_PATH": model, "RUN_DIR": run_dir, "PROXY_FRONTEND_PORT": port, "PROXY_BACKEND_PORT": backend_port,
        "HTTP_PORT": -1, "START_TIMEOUT_S": int(timeout_s), "DTYPE": engine_dtype(device), "N_LOGPROBS": TOP_K,
        "KV_CACHE_MIB": 64, "GPU_MEMORY_UTILIZATION": 0.2, **settings,
    }  # fmt: skip
    try:
        started = _run("start_server.sh", timeout_s + _STOP_TIMEOUT_S, **variables)
        if started.returncode:
            raise CheckFailed(f"teacher/start_server.sh failed:\n{started.stdout}{started.stderr}")
        yield port
    finally:
        _run("stop_server.sh", _STOP_TIMEOUT_S, RUN_DIR=run_dir)


def _run(script: str, timeout_s: float, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        ["bash", str(_SCRIPTS / script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
