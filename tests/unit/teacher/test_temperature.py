"""A temperature reaches the engine with its request and no other, and is refused where it would be ignored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teacher import ScoredSequence, TeacherClient, TeacherRequestError, TeacherSequence, TeacherTimeout
from teacher.engines.vllm_engine import VllmEngine
from teacher.engines.vllm_worker import LogitsCalls
from teacher.proxy import Proxy
from tests._support.fake_worker import INFO, TOO_COLD, FakeEngine, expected_answer, running_worker

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def client(proxy: Proxy) -> Iterator[TeacherClient]:
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as connected:
        yield connected


def sequence(*token_ids: int) -> TeacherSequence:
    return TeacherSequence(np.array(token_ids, np.int32), prompt_len=1)


def assert_answer(answers: list[ScoredSequence], asked: TeacherSequence, temperature: float) -> None:
    (got,) = answers
    want = expected_answer(asked, temperature)
    np.testing.assert_array_equal(got.topk_logps_TK, want.topk_logps_TK)
    np.testing.assert_array_equal(got.sampled_logps_T, want.sampled_logps_T)


def await_all_received(client: TeacherClient) -> None:
    """What was asked before has reached the worker: it reads in order, and refuses this one at once."""
    with pytest.raises(TeacherRequestError, match="outside the vocabulary"):
        client.submit([sequence(1, 100)]).result(timeout=5)


def test_each_request_is_answered_at_its_own_temperature(proxy: Proxy, client: TeacherClient) -> None:
    rng = np.random.default_rng(0)
    requests = [(sequence(*rng.integers(1, 90, 5)), float(rng.choice([0.5, 1.0, 2.0, 3.0]))) for _ in range(200)]
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as other, ThreadPoolExecutor(8) as callers:
        clients = itertools.cycle([client, other])
        with running_worker(proxy.backend_port), running_worker(proxy.backend_port):
            futures = list(
                callers.map(lambda who, request: who.submit([request[0]], temperature=request[1]), clients, requests)
            )
            for future, (asked, temperature) in zip(futures, requests, strict=True):
                assert_answer(future.result(timeout=20), asked, temperature)


def test_one_temperature_goes_in_together_and_nobody_is_overtaken_for_ever(proxy: Proxy, client: TeacherClient) -> None:
    order: list[str] = []
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        futures = []
        for name, temperature in {"a": 1.0, "b": 1.0, "C": 2.0, "d": 1.0, "E": 0.5, "F": 2.0, "g": 1.0}.items():
            future = client.submit([sequence(1, ord(name) % 90)], temperature=temperature)
            future.add_done_callback(lambda _, name=name: order.append(name))
            futures.append(future)
            if name == "a":
                assert worker.engine.added.acquire(timeout=5)  # the engine works: the others come later
        await_all_received(client)
        worker.engine.gate.set()
        for future in futures:
            future.result(timeout=5)
        # b joins a. d and g wait behind C, though the engine has their temperature when they come; F joins C.
        assert worker.engine.temperatures == [1.0, 2.0, 1.0, 0.5]
    assert order == ["b", "a", "F", "C", "g", "d", "E"]  # this engine takes the newest first


def test_a_request_that_expires_while_it_waits_for_its_turn_is_forgotten(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        first = client.submit([sequence(1, 2)])
        # The client hears it from the proxy: when the second has expired there, the first has in the worker.
        for behind in [client.submit([sequence(1, 3)], 0.4 * i, temperature=2.0 * i) for i in (1, 2)]:
            with pytest.raises(TeacherTimeout):
                behind.result(timeout=5)
        last = client.submit([sequence(1, 4)])
        worker.engine.gate.set()
        assert_answer(first.result(timeout=5), sequence(1, 2), 1.0)
        assert_answer(last.result(timeout=5), sequence(1, 4), 1.0)
        assert 2.0 not in worker.engine.temperatures


def test_requests_keep_their_temperature_when_their_worker_leaves(proxy: Proxy, client: TeacherClient) -> None:
    requests = [(sequence(1, 10 + i), (1.0, 2.0, 0.5)[i % 3]) for i in range(9)]
    leaving = FakeEngine()
    leaving.gate.clear()
    with running_worker(proxy.backend_port, leaving):
        futures = [client.submit([asked], temperature=temperature) for asked, temperature in requests]
        await_all_received(client)
    with running_worker(proxy.backend_port):
        for future, (asked, temperature) in zip(futures, requests, strict=True):
            assert_answer(future.result(timeout=10), asked, temperature)


def test_a_temperature_that_the_model_cannot_do_is_refused_alone(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port):
        refused = client.submit([sequence(1, 2)], temperature=TOO_COLD)
        with pytest.raises(TeacherRequestError, match=f"temperature {TOO_COLD} is not for this model"):
            refused.result(timeout=5)
        assert_answer(client.submit([sequence(1, 2)], temperature=0.5).result(timeout=5), sequence(1, 2), 0.5)


@pytest.mark.parametrize(
    "temperature", [0, -1.0, 1e-9, 1e9, float("nan"), float("inf"), True, "1", None, [1.0], 10**400]
)
def test_a_temperature_that_is_none_is_refused_by_the_client(client: TeacherClient, temperature: Any) -> None:
    with pytest.raises(TeacherRequestError, match=r"temperature must be a number .*gkd.distill_temperature"):
        client.submit([sequence(1, 2)], temperature=temperature).result(timeout=5)


class Model(torch.nn.Module):
    """bf16 logits behind a soft cap, as a model's `compute_logits` gives them."""

    def compute_logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return (5 * torch.tanh(hidden_TH / 5)).bfloat16()


@pytest.mark.parametrize("n_tokens", [None, 43])
def test_the_workers_temperature_divides_the_models_final_logits_without_rounding(n_tokens: int | None) -> None:
    hidden_TH = 20 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    calls, model = LogitsCalls(), Model()
    calls.model_runner = SimpleNamespace(model=model)
    plain, of_model = model.compute_logits(hidden_TH), model.compute_logits
    for temperature in (2.0, 0.7, 0.7, 1.0):
        calls.set_logits(temperature, n_tokens)
        got = model.compute_logits(hidden_TH).log_softmax(dim=-1, dtype=torch.float32)
        want = (plain[:, :n_tokens].double() / temperature).log_softmax(dim=-1)
        torch.testing.assert_close(got[:, :n_tokens].double(), want, atol=1e-6, rtol=1e-6)
        assert n_tokens is None or (got[:, n_tokens:] == float("-inf")).all()
    calls.set_logits(1.0, None)
    assert model.compute_logits == of_model, "without either, nothing stands between the model and its logits"


@pytest.mark.parametrize("fault", ["ignored", "refused by vLLM", "none"])
def test_an_engine_whose_temperature_has_no_effect_serves_only_those_who_want_none(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_TV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))

    def set_temperature(engine: VllmEngine, temperature: float) -> None:
        if fault == "refused by vLLM":
            raise AttributeError("the model has no compute_logits")
        engine._temperature = temperature

    def score_probe(engine: VllmEngine) -> ScoredSequence:
        logps_TV = (logits_TV / (1.0 if fault == "ignored" else engine.temperature)).log_softmax(dim=-1)
        topk = logps_TV.topk(4)
        return ScoredSequence(topk.values.numpy(), topk.indices.int().numpy(), logps_TV[:, 0].numpy())

    monkeypatch.setattr(VllmEngine, "set_temperature", set_temperature)
    monkeypatch.setattr(VllmEngine, "_score_probe", score_probe)
    engine = VllmEngine.__new__(VllmEngine)
    engine._info, engine._temperature, engine._why_only_temperature_1 = INFO, 1.0, ""
    engine._k, engine._max_answer_bytes = INFO.n_logprobs, 2**20
    engine._self_check()
    engine.check(sequence(1, 2), 1.0)
    assert engine.temperature == 1.0
    if fault == "none":
        engine.check(sequence(1, 2), 2.0)
        return
    with pytest.raises(TeacherRequestError, match=r"at temperature 1 only, got 2: .*gkd.distill_temperature=1"):
        engine.check(sequence(1, 2), 2.0)
