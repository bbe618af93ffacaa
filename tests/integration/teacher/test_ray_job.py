"""launch/teacher_on_ray.py on a separate Ray instance, with a real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from teacher import TeacherClient, TeacherSequence
from teacher.wire.make_keys import make_keys
from tests._support.ports import free_port
from tests._support.teacher_service import REPO, processes_of
from tests._support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


def test_ray_job_restarts_dead_processes_and_leaves_none(tiny_qwen2: Path, tmp_path: Path) -> None:
    auth_dir = tmp_path / "keys"
    make_keys(auth_dir)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "launch.teacher_on_ray",
        "--cpu",
        "--server-ip=127.0.0.1",
        f"--frontend-port={port}",
    ]
    command += [
        f"--backend-port={free_port()}",
        "--http-port=-1",
        f"--auth-dir={auth_dir}",
        f"--ckpt-path={tiny_qwen2}",
    ]
    command += ["--n-logprobs=4", "--kv-cache-mib=16", "--dtype=float32"]
    environment = {**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    sequences = [TeacherSequence(np.arange(8, dtype=np.int32), 2)]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=log)
    try:
        with TeacherClient(server_port=port, timeout_s=PATIENCE_S, auth_dir=auth_dir) as client:
            (before,) = client.submit(sequences).result()
            for kind in ("worker", "proxy"):
                (pid,) = [pid for pid in processes_of(auth_dir) if is_teacher(pid, kind)]
                kill_teacher(pid, kind)
                (after,) = client.submit(sequences).result()
                np.testing.assert_array_equal(before.topk_ids_TK, after.topk_ids_TK)
        job.terminate()
        assert job.wait(timeout=PATIENCE_S) == 0
    finally:
        job.kill()
        job.wait(timeout=PATIENCE_S)
        deadline = time.monotonic() + 20
        while (left := processes_of(auth_dir)) and time.monotonic() < deadline:
            threading.Event().wait(0.1)
    assert left == [], (tmp_path / "log").read_text()
    log_text = (tmp_path / "log").read_text()
    assert f"actor_rollout_ref.teacher.server_port={port}" in log_text and "restarting it in" in log_text


def test_ray_job_public_address_without_keys_ends_at_once(tiny_qwen2: Path) -> None:
    command = [sys.executable, "-m", "launch.teacher_on_ray", "--cpu", "--bind=0.0.0.0", f"--ckpt-path={tiny_qwen2}"]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    ended = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 1 and "python -m teacher keys" in ended.stderr


def kill_teacher(pid: int, kind: str) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_teacher(pid, kind))


def is_teacher(pid: int, kind: str) -> bool:
    try:
        return f"teacher\0{kind}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
