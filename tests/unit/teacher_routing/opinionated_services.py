"""Teacher services, with proxy and worker, whose engines compute nothing but have each an opinion of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from teacher.errors import TeacherRequestError
from teacher.proxy import Proxy
from teacher.records import ModelInfo, ScoredSequence, TeacherSequence
from teacher.worker import Worker

N_TOKENS, K = 100, 4
REFUSED = 99
"""A token that no engine scores."""


def opinion(sequence: TeacherSequence, offset: int) -> ScoredSequence:
    """Of the service with this offset: depends on every response token."""
    response_T = sequence.token_ids[sequence.prompt_len :]
    topk_ids_TK = (response_T[:, None] + offset + np.arange(K, dtype=np.int32)) % N_TOKENS
    topk_logps_TK = np.tile(np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32), (len(response_T), 1))
    return ScoredSequence(topk_logps_TK, topk_ids_TK, -(response_T + offset).astype(np.float32))


class Engine:
    info = ModelInfo(
        "opinionated",
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
            raise TeacherRequestError(f"token {REFUSED} is not scored here")

    def add(self, key: int, sequence: TeacherSequence) -> None:
        self._waiting[key] = sequence

    def discard(self, keys: list[int]) -> None:
        for key in keys:
            self._waiting.pop(key, None)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[tuple[int, ScoredSequence]]:
        key, sequence = self._waiting.popitem()  # not in the order of asking
        return [(key, opinion(sequence, self._offset))]

    def close(self) -> None:
        self._waiting.clear()


class StopFlag:
    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()

    def set(self) -> None:
        self._sender.send(b"\0")

    def fileno(self) -> int:
        return self._receiver.fileno()


@contextmanager
def serving(serve: Callable[..., None]) -> Iterator[None]:
    """Run a proxy's or a worker's ``run`` in a thread; ended afterwards."""
    end = StopFlag()
    thread = threading.Thread(target=serve, args=(end,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(timeout=10)
        assert not thread.is_alive()


@contextmanager
def proxy_without_workers(port: int = 0) -> Iterator[Proxy]:
    proxy = Proxy(frontend_port=port, backend_port=0)
    with serving(proxy.run):
        yield proxy


@contextmanager
def worker_of(proxy: Proxy, offset: int) -> Iterator[None]:
    with serving(Worker(Engine(offset), backend_port=proxy.backend_port).run):
        yield


@contextmanager
def service(offset: int, port: int = 0) -> Iterator[int]:
    """Its port; gone afterwards."""
    with proxy_without_workers(port) as proxy, worker_of(proxy, offset):
        yield proxy.frontend_port
