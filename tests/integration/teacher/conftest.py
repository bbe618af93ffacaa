"""Fixtures of the service's integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.fixtures import proxy, restored_logging
from tests._support.ports import free_port
from tests._support.teacher_service import VOCAB_SIZE, Service, processes_of, run_script

__all__ = ["proxy", "restored_logging"]


@pytest.fixture(scope="session")
def service(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a real service with its gateway that returns whole distributions: K = vocabulary size."""
    run_dir, port, backend_port = tmp_path_factory.mktemp("teacher_service"), free_port(), free_port()
    openai_port = free_port()
    temporary = tmp_path_factory.mktemp("temporary")
    started = run_script(
        "start_server.sh",
        *("--ckpt-path", str(tiny_qwen2), "--run-dir", str(run_dir), "--dtype", "float32", "--logits-mib", "1"),
        *("--n-logprobs", str(VOCAB_SIZE), "--kv-cache-mib", "16", "--start-timeout-s", "600", "--sleep-mode", "1"),
        *("--proxy-frontend-port", str(port), "--proxy-backend-port", str(backend_port)),
        *("--openai-port", str(openai_port)),
        TMPDIR=str(temporary),
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert list(temporary.glob("teacher_*/vllm_dist_*"))
        yield Service(port, backend_port, openai_port, run_dir, tiny_qwen2)
    finally:
        stopped = run_script("stop_server.sh", "--run-dir", str(run_dir))
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert processes_of(run_dir) == [] and "killing" not in stopped.stderr
        assert list(temporary.rglob("*vllm_dist*")) == list(temporary.glob("teacher_*")) == []
