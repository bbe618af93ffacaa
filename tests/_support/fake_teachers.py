"""Teacher services in this process, with a real proxy and worker. Each fake engine returns scores of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from teacher.errors import TeacherRequestError
from teacher.proxy import Proxy
from teacher.records import ModelInfo, ScoredSequence, TeacherSequence
from teacher.worker import Worker
from tests._support.teacher_service import StopFlag

N_TOKENS, K = 100, 4
REFUSED = 99  # a token that every engine rejects


def fake_scores(sequence: TeacherSequence, offset: int) -> ScoredSequence:
    """Return the scores of the engine with this offset. They depend on every response token."""
    response_T = sequence.token_ids[sequence.prompt_len :]
    topk_ids_TK = (response_T[:, None] + offset + np.arange(K, dtype=np.int32)) % N_TOKENS
    topk_logps_TK = np.tile(np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32), (len(response_T), 1))
    return ScoredSequence(topk_logps_TK, topk_ids_TK, -(response_T + offset).astype(np.float32))


class FakeScoringEngine:
    info = ModelInfo(
        "fake",
        vocab_size=N_TOKENS,
        n_tokens=N_TOKENS,
        tokenizer_fingerprint="none",
        max_model_len=64,
        n_logprobs=K,
        engine="none",
        eos_token_ids=(),
    )
    capacity_tokens = 1000
    temperature = 1.0

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._waiting: dict[int, TeacherSequence] = {}

    def set_temperature(self, temperature: float) -> None:
        self.temperature = temperature

    def check(self, sequence: TeacherSequence, temperature: float) -> None:
        if REFUSED in sequence.token_ids:
            raise TeacherRequestError(f"token {REFUSED} is rejected")

    def add(self, key: int, sequence: TeacherSequence) -> None:
        self._waiting[key] = sequence

    def discard(self, keys: list[int]) -> None:
        for key in keys:
            self._waiting.pop(key, None)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[tuple[int, ScoredSequence]]:
        key, sequence = self._waiting.popitem()  # not in the order of arrival
        return [(key, fake_scores(sequence, self._offset))]

    def close(self) -> None:
        self._waiting.clear()


@contextmanager
def serving(serve: Callable[..., None]) -> Iterator[None]:
    """Run the ``run`` method of a proxy or worker in a thread, and stop it at the end."""
    stop = StopFlag()
    thread = threading.Thread(target=serve, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=10)
        assert not thread.is_alive()
        stop.close()


@contextmanager
def proxy_without_workers(port: int = 0) -> Iterator[Proxy]:
    proxy = Proxy(frontend_port=port, backend_port=0)
    with serving(proxy.run):
        yield proxy


@contextmanager
def worker_of(proxy: Proxy, offset: int) -> Iterator[None]:
    with serving(Worker(FakeScoringEngine(offset), backend_port=proxy.backend_port).run):
        yield


@contextmanager
def service(offset: int, port: int = 0) -> Iterator[int]:
    """Run a service with one worker and yield its port."""
    with proxy_without_workers(port) as proxy, worker_of(proxy, offset):
        yield proxy.frontend_port
