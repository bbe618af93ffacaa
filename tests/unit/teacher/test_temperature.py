"""Temperatures reach the engine with their request only, and are refused where they would have no effect."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teacher import ScoredSequence, TeacherClient, TeacherRequestError, TeacherSequence, TeacherTimeout
from teacher.common.vllm_worker import LogitsCalls
from teacher.engines.sizes import ResultMemory
from teacher.engines.vllm_engine import VllmEngine
from teacher.proxy import Proxy
from teacher.records import LogitSettings
from tests._support.errors import raises
from tests._support.fake_worker import INFO, TOO_COLD, FakeEngine, expected_scores, running_worker
from tests._support.teacher_requests import make_sequence


def assert_scored(answers: list[ScoredSequence], sequence: TeacherSequence, temperature: float) -> None:
    (actual,) = answers
    expected = expected_scores(sequence, temperature)
    np.testing.assert_array_equal(actual.topk_logps_TK, expected.topk_logps_TK)
    np.testing.assert_array_equal(actual.sampled_logps_T, expected.sampled_logps_T)


def wait_for_worker_to_read(client: TeacherClient) -> None:
    """Wait until the worker has read all earlier requests. It reads in order and refuses this one at once."""
    with raises(TeacherRequestError, sequence=0, argument="token_ids"):
        client.submit([make_sequence(1, 100)]).result(timeout=60)


def test_requests_are_scored_at_their_temperature(proxy: Proxy, client: TeacherClient) -> None:
    rng = np.random.default_rng(0)
    requests = [(make_sequence(*rng.integers(1, 90, 5)), float(rng.choice([0.5, 1.0, 2.0, 3.0]))) for _ in range(200)]
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as other, ThreadPoolExecutor(8) as callers:
        clients = itertools.cycle([client, other])
        with running_worker(proxy.backend_port), running_worker(proxy.backend_port):
            futures = list(
                callers.map(
                    lambda client, request: client.submit([request[0]], temperature=request[1]), clients, requests
                )
            )
            for future, (sequence, temperature) in zip(futures, requests, strict=True):
                assert_scored(future.result(timeout=60), sequence, temperature)


def test_requests_are_scored_with_the_vocabulary_of_their_client(proxy: Proxy, client: TeacherClient) -> None:
    seen: list[LogitSettings] = []
    with (
        TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as other,
        running_worker(proxy.backend_port) as worker,
    ):
        check = worker.engine.check

        def record(sequence: TeacherSequence, settings: LogitSettings) -> None:
            seen.append(settings)
            check(sequence, settings)

        worker.engine.check = record  # type: ignore[method-assign]
        other.restrict_ids(50)
        for each, temperature in ((client, 1.0), (other, 1.0), (other, 2.0), (client, 1.0)):
            each.submit([make_sequence(1, 2)], temperature=temperature).result(timeout=60)
        assert worker.engine.logits == LogitSettings()
    assert seen == [LogitSettings(), LogitSettings(1.0, 50), LogitSettings(2.0, 50), LogitSettings()]


def test_worker_groups_by_temperature_without_starvation(proxy: Proxy, client: TeacherClient) -> None:
    order: list[str] = []
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        futures = []
        for name, temperature in {"a": 1.0, "b": 1.0, "C": 2.0, "d": 1.0, "E": 0.5, "F": 2.0, "g": 1.0}.items():
            future = client.submit([make_sequence(1, ord(name) % 90)], temperature=temperature)
            future.add_done_callback(lambda _, name=name: order.append(name))
            futures.append(future)
            if name == "a":
                assert worker.engine.added.acquire(timeout=60)  # the engine is busy before the others arrive
        wait_for_worker_to_read(client)
        worker.engine.gate.set()
        for future in futures:
            future.result(timeout=60)
        # b joins a. d and g wait behind C although they have the engine's temperature. F joins C.
        assert worker.engine.temperatures == [1.0, 2.0, 1.0, 0.5]
    assert order == ["b", "a", "F", "C", "g", "d", "E"]  # the fake engine scores the newest first


def test_expired_waiting_request_never_enters_engine(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        first = client.submit([make_sequence(1, 2)])
        # The proxy reports the deadline. When the second request expired there, the first one expired at the worker.
        for behind in [client.submit([make_sequence(1, 3)], 0.4 * i, temperature=2.0 * i) for i in (1, 2)]:
            with pytest.raises(TeacherTimeout):
                behind.result(timeout=60)
        last = client.submit([make_sequence(1, 4)])
        worker.engine.gate.set()
        assert_scored(first.result(timeout=60), make_sequence(1, 2), 1.0)
        assert_scored(last.result(timeout=60), make_sequence(1, 4), 1.0)
        assert 2.0 not in worker.engine.temperatures


def test_requeued_requests_keep_their_temperature(proxy: Proxy, client: TeacherClient) -> None:
    requests = [(make_sequence(1, 10 + i), (1.0, 2.0, 0.5)[i % 3]) for i in range(9)]
    leaving = FakeEngine()
    leaving.gate.clear()
    with running_worker(proxy.backend_port, leaving):
        futures = [client.submit([sequence], temperature=temperature) for sequence, temperature in requests]
        wait_for_worker_to_read(client)
    with running_worker(proxy.backend_port):
        for future, (sequence, temperature) in zip(futures, requests, strict=True):
            assert_scored(future.result(timeout=60), sequence, temperature)


def test_unsupported_temperature_fails_alone(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port):
        refused = client.submit([make_sequence(1, 2)], temperature=TOO_COLD)
        with raises(TeacherRequestError, sequence=0, argument="temperature"):
            refused.result(timeout=60)
        assert_scored(
            client.submit([make_sequence(1, 2)], temperature=0.5).result(timeout=60), make_sequence(1, 2), 0.5
        )


@pytest.mark.parametrize(
    "temperature", [0, -1.0, 1e-9, 1e9, float("nan"), float("inf"), True, "1", None, [1.0], 10**400]
)
def test_client_refuses_invalid_temperature(client: TeacherClient, temperature: Any) -> None:
    with raises(TeacherRequestError, sequence=None, argument="temperature"):
        client.submit([make_sequence(1, 2)], temperature=temperature).result(timeout=60)


class Model(torch.nn.Module):
    """Model with bf16 logits after a soft cap."""

    def compute_logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return (5 * torch.tanh(hidden_TH / 5)).bfloat16()


@pytest.mark.parametrize("n_tokens", [None, 43])
def test_logits_calls_divide_final_logits_in_fp32(n_tokens: int | None) -> None:
    hidden_TH = 20 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    calls, model = LogitsCalls(), Model()
    calls.model_runner = SimpleNamespace(model=model)
    plain, of_model = model.compute_logits(hidden_TH), model.compute_logits
    for temperature in (2.0, 0.7, 0.7, 1.0):
        calls.set_logits(temperature, n_tokens)
        actual = model.compute_logits(hidden_TH).log_softmax(dim=-1, dtype=torch.float32)
        expected = (plain[:, :n_tokens].double() / temperature).log_softmax(dim=-1)
        torch.testing.assert_close(actual[:, :n_tokens].double(), expected, atol=1e-6, rtol=1e-6)
        assert n_tokens is None or (actual[:, n_tokens:] == float("-inf")).all()
    calls.set_logits(1.0, None)
    assert model.compute_logits == of_model, "without temperature and padding, the model's own method is used"


@pytest.mark.parametrize("fault", ["ignored", "refused by vLLM", "none"])
def test_engine_without_temperature_scores_at_1_only(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))

    def set_logits(engine: VllmEngine, settings: LogitSettings) -> None:
        if fault == "refused by vLLM":
            raise AttributeError("the model has no compute_logits")
        engine._logits = settings

    def score_probe(engine: VllmEngine) -> ScoredSequence:
        logits = engine.logits
        kept_TV = logits_TV if fault == "ignored" or not logits.n_ids else logits_TV[:, : logits.n_ids]
        logps_TV = (kept_TV / (1.0 if fault == "ignored" else logits.temperature)).log_softmax(dim=-1)
        topk = logps_TV.topk(4)
        return ScoredSequence(topk.values.numpy(), topk.indices.int().numpy(), logps_TV[:, 0].numpy())

    monkeypatch.setattr(VllmEngine, "set_logits", set_logits)
    monkeypatch.setattr(VllmEngine, "_score_probe", score_probe)
    monkeypatch.setattr(VllmEngine, "_check_shared_prompt", lambda _: None)
    engine = VllmEngine.__new__(VllmEngine)
    engine._info, engine._logits, engine._temperature_error, engine._n_ids_error = INFO, LogitSettings(), "", ""
    engine._k, engine._memory = INFO.n_logprobs, ResultMemory(INFO.n_logprobs, id_bytes=4, max_bytes=2**20)
    engine._self_check()
    engine.check(make_sequence(1, 2), LogitSettings())
    assert engine.logits == LogitSettings()
    if fault == "none":
        engine.check(make_sequence(1, 2), LogitSettings(2.0, INFO.n_tokens - 1))
        return
    with raises(TeacherRequestError, argument="temperature"):
        engine.check(make_sequence(1, 2), LogitSettings(2.0))
    with raises(TeacherRequestError, argument="n_ids"):
        engine.check(make_sequence(1, 2), LogitSettings(n_ids=INFO.n_tokens - 1))
