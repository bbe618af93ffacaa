"""A server of vLLM as the teacher: rows equal transformers', and a server that is killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.teachers.hf_teacher import HfTeacher
from teacher.client.http import Endpoint, HttpClientSpec, HttpTeacherClient
from teacher.errors import TeacherSetupError, TeacherUnreachable
from teacher.records import TeacherSequence
from tests._support.errors import raises
from tests._support.ports import free_port
from tests._support.teacher_service import MAX_MODEL_LEN, VOCAB_SIZE
from tests._support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow
MAX_LOGPROBS = 64


class VllmServer:
    """Process of ``vllm serve``, whose command line program needs the metadata of the package for GPUs."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log, self._port = model, log, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it serves."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += ["--port", str(self._port), "--max-logprobs", str(MAX_LOGPROBS), "--dtype", "float32"]
        command += ["--enforce-eager", "--max-num-batched-tokens", "16", "--enable-chunked-prefill"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        environment = inherited | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._serves)

    def _serves(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        with suppress(urllib.error.URLError, OSError):
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        return False

    def kill(self) -> None:
        """Kill the process with its engine."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def server(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(tiny_qwen2, tmp_path_factory.mktemp("vllm_serve") / "log")
    server.start()
    yield server
    server.kill()


def client_of(server: VllmServer, folder: Path, top_k: int = MAX_LOGPROBS) -> HttpTeacherClient:
    return HttpClientSpec((Endpoint(server.url),), str(folder), top_k=top_k, timeout_s=PATIENCE_S).open()


def test_rows_equal_transformers(server: VllmServer, tiny_qwen2: Path) -> None:
    """Sequences of one token, of one engine step, and of several (16 tokens per step)."""
    rng = np.random.default_rng(0)
    shapes = [(2, 1), (MAX_MODEL_LEN - 1, 1), (20, 19), (33, 7)]
    sequences = [TeacherSequence(rng.integers(0, VOCAB_SIZE, n).astype(np.int32), start) for n, start in shapes]
    client, reference = client_of(server, tiny_qwen2), HfTeacher(str(tiny_qwen2), top_k=MAX_LOGPROBS, device="cpu")
    try:
        assert client.hello().tokenizer_fingerprint == reference.hello().tokenizer_fingerprint
        found, expected = client.submit(sequences).result(), reference.submit(sequences).result(PATIENCE_S)
    finally:
        client.close()
        reference.close()
    for result, of_transformers in zip(found, expected, strict=True):
        np.testing.assert_allclose(result.topk_logps_TK, of_transformers.topk_logps_TK, atol=1e-5)
        np.testing.assert_allclose(result.sampled_logps_T, of_transformers.sampled_logps_T, atol=1e-5)
        differs_TK = result.topk_ids_TK != of_transformers.topk_ids_TK
        assert differs_TK.mean() < 0.01  # equal except for ids whose log-probabilities are equal to 1e-5


def test_limit_of_log_probabilities_names_the_flag(server: VllmServer, tiny_qwen2: Path) -> None:
    client = client_of(server, tiny_qwen2, top_k=MAX_LOGPROBS + 1)
    try:
        with raises(TeacherSetupError, remedy=f"start it with --max-logprobs {MAX_LOGPROBS + 1}, or lower top_k"):
            client.hello()
    finally:
        client.close()


def test_killed_server_is_an_error_at_the_deadline_and_is_used_after_its_restart(
    server: VllmServer, tiny_qwen2: Path
) -> None:
    sequences = [TeacherSequence([5, 6, 7, 8], 2)] * 50
    client = client_of(server, tiny_qwen2)
    try:
        expected = client.submit(sequences).result()
        server.kill()
        with raises(TeacherUnreachable):
            client.submit(sequences, 10.0).result(PATIENCE_S)
        waiting = client.submit(sequences)
        server.start()
        for result, before in zip(waiting.result(PATIENCE_S), expected, strict=True):
            np.testing.assert_allclose(result.topk_logps_TK, before.topk_logps_TK, atol=1e-5)
    finally:
        client.close()
