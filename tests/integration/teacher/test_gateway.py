"""The gateway in front of a real service: format of vLLM, and rows of the service over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from teacher import TeacherClient, TeacherSequence
from teacher.client.http import Endpoint, HttpClientSpec
from teacher.errors import TeacherRequestError
from tests._support.errors import raises
from tests._support.teacher_service import MAX_MODEL_LEN, VOCAB_SIZE, Service
from tests._support.waiting import PATIENCE_S

TOP_K = 8
KEY = "GATEWAY_TEST_KEY"


@contextmanager
def gateway(service: Service, *flags: str) -> Iterator[str]:
    """Run the command and yield the base URL."""
    command = [sys.executable, "-m", "teacher", "gateway", "--port", str(service.port), "--http-port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {KEY: "secret"})
    try:
        assert process.stderr is not None
        [address] = re.findall("serving (http://.+)/v1/completions", process.stderr.readline())
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with gateway(service) as url:
        yield url


def post(url: str, body: dict[str, Any], key: str = "") -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=PATIENCE_S))


def test_response_has_the_format_of_vllm(service: Service, url: str) -> None:
    ids = [9, 8, 7, 95, 3]
    completion = post(url, {"model": service.ckpt_path.name, "prompt": [ids, ids[:2]], "prompt_logprobs": TOP_K})
    with TeacherClient(server_port=service.port) as client:
        scored = client.submit([TeacherSequence(ids, 1), TeacherSequence(ids[:2], 1)]).result()
    for choice, scores, n_tokens in zip(completion["choices"], scored, (5, 2), strict=True):
        first, *positions = choice["prompt_logprobs"]
        assert first is None and len(positions) == n_tokens - 1
        for row, entries in enumerate(positions):
            token = str(ids[row + 1])
            assert entries[token]["logprob"] == pytest.approx(float(scores.sampled_logps_T[row]), abs=1e-5)
            by_rank = {entry["rank"]: int(id_) for id_, entry in entries.items()}
            assert [by_rank[rank] for rank in range(1, TOP_K + 1)] == scores.topk_ids_TK[row, :TOP_K].tolist()


def test_gateway_of_the_service_returns_the_same_response(service: Service, url: str) -> None:
    body = {"prompt": [9, 8, 7, 95, 3], "prompt_logprobs": TOP_K}
    [choice] = post(f"http://127.0.0.1:{service.openai_port}", body)["choices"]
    [expected] = post(url, body)["choices"]
    assert len(choice["prompt_logprobs"]) == 5
    assert choice == expected


@pytest.mark.parametrize("top_k", [1, TOP_K, VOCAB_SIZE])
def test_rows_over_http_equal_rows_of_the_service(service: Service, url: str, top_k: int) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        TeacherSequence(rng.integers(0, VOCAB_SIZE, length), prompt_len)
        for length, prompt_len in [(2, 1), (MAX_MODEL_LEN - 1, 1), (20, 19), (33, 7)]
    ]
    spec = HttpClientSpec((Endpoint(url),), str(service.ckpt_path), requires_same_tokenizer=False, top_k=top_k)
    over_http = spec.open()
    try:
        found = over_http.submit(sequences).result(PATIENCE_S)
    finally:
        over_http.close()
    with TeacherClient(server_port=service.port, top_k=top_k) as client:
        expected = client.submit(sequences).result()
    for result, reference in zip(found, expected, strict=True):
        np.testing.assert_array_equal(result.topk_ids_TK, reference.topk_ids_TK)
        np.testing.assert_allclose(result.topk_logps_TK, reference.topk_logps_TK, atol=1e-5)
        np.testing.assert_allclose(result.sampled_logps_T, reference.sampled_logps_T, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "text", "prompt_logprobs": 1},
        {"prompt": [1], "prompt_logprobs": 1},
        {"prompt": [1, 2]},
        {"prompt": [1, 2], "prompt_logprobs": VOCAB_SIZE + 1},
        {"prompt": [1, 2], "prompt_logprobs": 1, "max_tokens": 5},
        {"prompt": [1, VOCAB_SIZE], "prompt_logprobs": 1},
        {"prompt": [1, 2], "prompt_logprobs": 1, "model": "other"},
    ],
    ids=["text", "one token", "no scores", "too many", "generation", "unknown id", "other model"],
)
def test_request_that_cannot_be_scored_is_refused_with_the_reason(url: str, body: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, body)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["message"]


def test_requests_without_the_key_are_refused(service: Service) -> None:
    with gateway(service, "--api-key-env", KEY) as url:
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(url, {"prompt": [1, 2], "prompt_logprobs": 1})
        assert caught.value.code == 401
        assert post(url, {"prompt": [1, 2], "prompt_logprobs": 1}, key="secret")["choices"]


def test_too_long_sequence_is_refused_with_its_position(service: Service, url: str) -> None:
    spec = HttpClientSpec((Endpoint(url),), str(service.ckpt_path), requires_same_tokenizer=False, top_k=1)
    client = spec.open()
    try:
        sequences = [TeacherSequence([1, 2], 1), TeacherSequence([1] * (MAX_MODEL_LEN + 1), 1)]
        with raises(TeacherRequestError, sequence=1, argument="token_ids"):
            client.submit(sequences).result(PATIENCE_S)
    finally:
        client.close()
