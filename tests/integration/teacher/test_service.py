"""A real service: scripts, proxy and vLLM workers on a tiny Qwen2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from recipe_gkd.commands.gpu_smoke import reference
from recipe_gkd.commands.gpu_smoke.teacher_checks import score_errors
from recipe_gkd.commands.gpu_smoke.tiny_models import read_model
from recipe_gkd.teachers.hf_teacher import HfTeacher
from teacher import TeacherClient, TeacherRequestError, TeacherSequence, tokenizer_fingerprint
from teacher.__main__ import main
from teacher.errors import TeacherAsleep
from tests._support.errors import raises
from tests._support.ports import free_port
from tests._support.teacher_service import MAX_MODEL_LEN, REPO, VOCAB_SIZE, Service, processes_of, run_script
from tests._support.waiting import PATIENCE_S, wait_until
from tests.integration.teacher import qwen2_float64


@pytest.fixture
def client(service: Service) -> Iterator[TeacherClient]:
    with TeacherClient(server_port=service.port, timeout_s=PATIENCE_S) as connected:
        yield connected


def random_sequences(lengths: list[tuple[int, int]]) -> list[TeacherSequence]:
    rng = np.random.default_rng(0)
    return [TeacherSequence(rng.integers(0, VOCAB_SIZE, n, dtype=np.int32), prompt_len) for n, prompt_len in lengths]


def test_hello_describes_served_model(service: Service, client: TeacherClient) -> None:
    from transformers import AutoTokenizer

    info = client.hello()
    assert (info.vocab_size, info.n_logprobs, info.max_model_len) == (VOCAB_SIZE, VOCAB_SIZE, MAX_MODEL_LEN)
    assert info.model_name == service.ckpt_path.name and info.n_workers == 1 and "float32" in info.engine
    assert info.eos_token_ids == (1,)
    assert info.tokenizer_fingerprint == tokenizer_fingerprint(AutoTokenizer.from_pretrained(service.ckpt_path))


ResponseLogits = Callable[[TeacherSequence], np.ndarray]


@pytest.fixture(scope="module")
def response_logits(service: Service) -> ResponseLogits:
    """Return a function that computes the float32 logits [T, V] of the served model with transformers."""
    model = read_model(service.ckpt_path, torch.float32)

    def logits_of(sequence: TeacherSequence) -> np.ndarray:
        with torch.no_grad():
            return reference.response_logits(model, sequence.token_ids, sequence.prompt_len).numpy()

    return logits_of


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted_TV = logits_TV.astype(np.float64) - logits_TV.max(axis=1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(axis=1, keepdims=True))


def test_scores_agree_with_transformers(client: TeacherClient, response_logits: ResponseLogits) -> None:
    """Compare whole distributions, from the shortest possible sequence to one of exactly the maximum length."""
    sequences = random_sequences([(MAX_MODEL_LEN, 1), (MAX_MODEL_LEN, MAX_MODEL_LEN - 1), (2, 1), (10, 4), (33, 20)])
    for sequence, scored in zip(sequences, client.submit(sequences).result(), strict=True):
        logps_TV = log_softmax(response_logits(sequence))
        assert logps_TV.max(axis=1).mean() > -3.5, "the model is too uniform to tell rows apart"
        assert score_errors(logps_TV, sequence, scored).max() < 1e-5
        np.testing.assert_array_equal(
            np.sort(scored.topk_ids_TK, axis=1), np.tile(np.arange(VOCAB_SIZE), (len(logps_TV), 1))
        )
        assert np.abs(np.exp(scored.topk_logps_TK.astype(np.float64)).sum(axis=1) - 1).max() < 1e-5


def test_score_error_is_at_most_four_times_that_transformers_error(
    service: Service, client: TeacherClient, response_logits: ResponseLogits
) -> None:
    """Compare both with float64. Their float32 rounding errors grow with the logits."""
    sequences = random_sequences([(MAX_MODEL_LEN, 1)] * 8)
    service_error = transformers_error = 0.0
    for sequence, scored in zip(sequences, client.submit(sequences).result(), strict=True):
        exact_TV = log_softmax(qwen2_float64.logits_NV(service.ckpt_path, sequence.token_ids)[:-1])
        exact_TK = np.take_along_axis(exact_TV, scored.topk_ids_TK, 1)
        service_error = max(service_error, np.abs(scored.topk_logps_TK - exact_TK).max())
        transformers_error = max(transformers_error, np.abs(log_softmax(response_logits(sequence)) - exact_TV).max())
    assert 1e-7 < transformers_error < 1e-5, "the reference is another model, or too inexact"
    assert service_error < 4 * transformers_error


def test_interleaved_clients_get_scores_at_their_own_temperature(
    service: Service, client: TeacherClient, response_logits: ResponseLogits
) -> None:
    """Long sequences span several engine steps, so that requests of both clients are in the engine together."""
    sequences = random_sequences([(n, 1 + n // 3) for n in range(MAX_MODEL_LEN - 20, MAX_MODEL_LEN)])
    with TeacherClient(server_port=service.port, timeout_s=PATIENCE_S) as other:
        futures = [
            (temperature, sequence, one_client.submit([sequence], temperature=temperature))
            for sequence in sequences
            for one_client, temperature in ((client, 0.5), (other, 2.0), (other, 1.0))
        ]
        results = [(temperature, sequence, future.result()[0]) for temperature, sequence, future in futures]
    for temperature, sequence, scored in results:
        logps_TV = log_softmax(response_logits(sequence) / temperature)
        response_T1 = sequence.token_ids[sequence.prompt_len :, None]
        assert np.abs(scored.topk_logps_TK - np.take_along_axis(logps_TV, scored.topk_ids_TK, 1)).max() < 1e-5
        assert np.abs(scored.sampled_logps_T - np.take_along_axis(logps_TV, response_T1, 1)[:, 0]).max() < 1e-5
        assert np.abs(np.exp(scored.topk_logps_TK.astype(np.float64)).sum(axis=1) - 1).max() < 1e-5


def test_scores_do_not_depend_on_concurrent_requests(client: TeacherClient) -> None:
    """Concurrent requests share engine steps, and long ones span several steps."""
    sequences = random_sequences([(n, 1 + n // 3) for n in range(4, MAX_MODEL_LEN + 1)] * 3)
    together = [client.submit([sequence]) for sequence in sequences]
    for sequence, future in list(zip(sequences, together, strict=True))[::20]:
        (alone,) = client.submit([sequence]).result()
        np.testing.assert_allclose(future.result()[0].topk_logps_TK, alone.topk_logps_TK, atol=1e-5)


def test_hf_teacher_agrees_with_service(service: Service, client: TeacherClient) -> None:
    sequences = random_sequences([(n, 1 + n // 3) for n in range(4, MAX_MODEL_LEN + 1, 7)])
    in_process = HfTeacher(str(service.ckpt_path), top_k=VOCAB_SIZE, device="cpu")
    try:
        assert in_process.hello().tokenizer_fingerprint == client.hello().tokenizer_fingerprint
        for temperature in (1.0, 0.5):
            pairs = zip(
                in_process.submit(sequences, 30.0, temperature=temperature).result(),
                client.submit(sequences, temperature=temperature).result(),
                strict=True,
            )
            for ours, theirs in pairs:
                np.testing.assert_allclose(ours.topk_logps_TK, theirs.topk_logps_TK, atol=1e-5)
                np.testing.assert_allclose(ours.sampled_logps_T, theirs.sampled_logps_T, atol=1e-5)
    finally:
        in_process.close()


@pytest.mark.parametrize(
    ("token_ids", "options"), [([1, VOCAB_SIZE], ()), ([-1, 1], ()), ([1] * 65, ("MAX_MODEL_LEN",))]
)
def test_invalid_request_fails_alone(client: TeacherClient, token_ids: list[int], options: tuple[str, ...]) -> None:
    good = random_sequences([(8, 2)])
    bad = [*good, TeacherSequence(np.array(token_ids, np.int32), 1)]
    futures = [client.submit(sequences) for sequences in (good, bad, good)]
    with raises(TeacherRequestError, sequence=1, argument="token_ids", options=options):
        futures[1].result()
    assert len(futures[0].result()) == len(futures[2].result()) == 1


def test_worker_log_is_empty(service: Service) -> None:
    assert (service.run_dir / "worker-0.log").read_text() == ""


def test_status_health_and_metrics_describe_service(
    service: Service, client: TeacherClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.submit(random_sequences([(8, 2)])).result()
    assert main(["status", "--port", str(service.port)]) == 0
    shown = capsys.readouterr().out
    assert f"{service.ckpt_path.name}, top {VOCAB_SIZE}" in shown and "since the start: scored" in shown
    address = f"http://127.0.0.1:{service.port + 2}"  # the default address
    with urllib.request.urlopen(f"{address}/healthz", timeout=PATIENCE_S) as health:
        assert health.status == 200
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as metrics:
        assert "teacher_worker_scored_tokens_total{" in metrics.read().decode()


def test_service_sleeps_and_wakes_with_the_same_scores(
    service: Service, client: TeacherClient, capsys: pytest.CaptureFixture[str]
) -> None:
    sequences = random_sequences([(8, 2), (30, 10)])
    before = client.submit(sequences).result()
    assert main(["sleep", "--port", str(service.port)]) == 0
    with raises(TeacherAsleep, address=client.address):
        client.submit(sequences).result()
    assert main(["wake", "--port", str(service.port)]) == 0
    assert "1 workers are awake and verified" in capsys.readouterr().out
    for old, new in zip(before, client.submit(sequences).result(), strict=True):
        np.testing.assert_array_equal(old.topk_logps_TK, new.topk_logps_TK)
        np.testing.assert_array_equal(old.sampled_logps_T, new.sampled_logps_T)


def test_second_service_on_same_port_is_refused(service: Service, client: TeacherClient, tmp_path: Path) -> None:
    port_flags = ("--proxy-frontend-port", str(service.port), "--proxy-backend-port", str(free_port()))
    for run_dir in (tmp_path, service.run_dir):
        refused = run_script(
            "start_server.sh", "--ckpt-path", str(service.ckpt_path), "--run-dir", str(run_dir), *port_flags
        )
        assert refused.returncode == 1 and f"port {service.port} of 127.0.0.1 is in use" in refused.stderr
    assert client.hello().n_workers == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "missing",
        "no model",
        "damaged weights",
        "unset",
        "unknown backend",
        pytest.param("k too large", marks=pytest.mark.slow),
        "ranks do not divide the heads",
        pytest.param("longer than the model", marks=pytest.mark.slow),
    ],
)
def test_start_invalid_settings_fails_without_leaving_processes(wrong: str, tiny_qwen2: Path, tmp_path: Path) -> None:
    folder, run_dir, flags = tmp_path / "model", tmp_path / "run", []
    if wrong == "no model":
        folder.mkdir()
        (folder / "notes.txt").write_text("no model")
    elif wrong == "damaged weights":
        folder.mkdir()
        for path in tiny_qwen2.iterdir():
            content = path.read_bytes()
            (folder / path.name).write_bytes(content[: len(content) // 2] if path.suffix == ".safetensors" else content)
    elif wrong in (
        of_options := {
            "unknown backend": "--backend=sglang",
            "k too large": f"--n-logprobs={VOCAB_SIZE + 1}",
            "ranks do not divide the heads": "--tp-size=3",
            "longer than the model": "--max-model-len=3072",
        }
    ):
        folder, flags = tiny_qwen2, [of_options[wrong]]
    flags += [] if wrong == "unset" else ["--ckpt-path", str(folder), "--kv-cache-mib", "16"]
    flags += ["--n-logprobs=4"] if wrong != "k too large" else []
    ports = [f"--proxy-frontend-port={free_port()}", f"--proxy-backend-port={free_port()}"]

    failed = run_script("start_server.sh", *flags, *ports, "--run-dir", str(run_dir))
    assert failed.returncode == 1
    expected = {
        "missing": "model is not a folder; expected a local model",
        "no model": "has no config.json",
        "damaged weights": "model/model.safetensors is damaged: its",
        "unset": "CKPT_PATH is not set",
        "unknown backend": "BACKEND must be vllm, got 'sglang'",
        "k too large": f"N_LOGPROBS must be 1 to the model's vocabulary size {VOCAB_SIZE}",
        "ranks do not divide the heads": "TP_SIZE=3 does not divide the model's 2 attention heads; set TP_SIZE to",
        "longer than the model": f"MAX_MODEL_LEN=3072, but the model in CKPT_PATH={tiny_qwen2} takes at most 64 tokens",
    }[wrong]
    assert expected in failed.stderr and "Traceback" not in failed.stderr, failed.stderr
    assert processes_of(run_dir) == []


def test_start_interrupted_leaves_no_process(tiny_qwen2: Path, tmp_path: Path) -> None:
    ports = [f"--proxy-frontend-port={free_port()}", f"--proxy-backend-port={free_port()}"]
    command = [REPO / "teacher" / "start_server.sh", "--ckpt-path", tiny_qwen2, "--run-dir", tmp_path, *ports]
    starting = subprocess.Popen(command, env={**os.environ, "PYTHON": sys.executable})
    try:
        wait_until((tmp_path / "worker-0.pid").exists)
        starting.terminate()
        assert starting.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
    finally:
        starting.kill()
        starting.wait(timeout=PATIENCE_S)
        run_script("stop_server.sh", "--run-dir", str(tmp_path))
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_stop_ends_only_own_hanging_worker(service: Service, client: TeacherClient, tmp_path: Path) -> None:
    """A pid file of an unrelated process in the same folder must be left alone."""
    flags = ("--ckpt-path", str(service.ckpt_path), "--n-logprobs", str(VOCAB_SIZE), "--dtype", "float32")
    flags += ("--kv-cache-mib", "16", "--proxy-backend-port", str(service.backend_port), "--run-dir", str(tmp_path))
    try:
        joined = run_script("join_server.sh", *flags)
        assert joined.returncode == 0, joined.stderr
        assert client.hello().n_workers == 2
        os.kill(int((tmp_path / "worker-0.pid").read_text().split()[0]), signal.SIGSTOP)
        record = (tmp_path / "worker-0.pid").read_text().split()
        stranger = [str(os.getpid()), "1", *record[2:]]  # this process, with another start time
        (tmp_path / "stranger.pid").write_text(" ".join(stranger) + "\n")
    finally:
        stopped = run_script("stop_server.sh", "--run-dir", str(tmp_path), "--stop-timeout-s", "1")
    assert stopped.returncode == 0 and "killing" in stopped.stderr
    assert processes_of(tmp_path) == [] and len(processes_of(service.run_dir)) == 3
    wait_until(lambda: client.hello().n_workers == 1)
    assert len(client.submit(random_sequences([(8, 2)])).result()) == 1
    assert "nothing to stop" in run_script("stop_server.sh", "--run-dir", str(tmp_path)).stdout


@pytest.mark.parametrize("script", ["start_server.sh", "join_server.sh", "stop_server.sh"])
def test_script_help_describes_options(script: str) -> None:
    shown = run_script(script, "--help")
    assert shown.returncode == 0 and "RUN_DIR" in shown.stdout
    assert "unknown option --nonsense" in run_script(script, "--nonsense", "1").stderr
    assert os.access(REPO / "teacher" / script, os.X_OK)
