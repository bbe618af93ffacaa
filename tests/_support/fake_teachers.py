"""Teacher services in this process, with a real proxy and worker and a fake engine, and samples for them.

The engine of each service has an offset, so that its scores differ from those of other services.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from recipe_gkd.data.samples import Prompt, Response, Sample
from teacher.common.fingerprint import N_LAST_TOKENS
from teacher.errors import TeacherRequestError
from teacher.proxy import Proxy
from teacher.records import LastToken, ScoredSequence, TeacherInfo, TeacherSequence
from tests._support.fake_worker import INFO, FakeEngine, running_worker
from tests._support.teacher_service import running_proxy

N_TOKENS, K = 151_936, INFO.n_logprobs
LAST_TOKENS = tuple(
    LastToken(token, f"<|reserved_special_token_{token}|>", f"sha256:{token:064x}")
    for token in range(N_TOKENS - N_LAST_TOKENS, N_TOKENS)
)
"""Last tokens of a vocabulary of real size: pickled, they are larger than what Ray sends inline."""
MAX_MODEL_LEN = 64_000
REFUSED = 99  # a token that every engine rejects


def fake_scores(sequence: TeacherSequence, offset: int) -> ScoredSequence:
    """Return the scores of the engine with this offset. They depend on every response token."""
    response_T = sequence.scored_ids_T
    topk_ids_TK = (response_T[:, None] + offset + np.arange(K, dtype=np.int32)) % N_TOKENS
    topk_logps_TK = np.tile(np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32), (len(response_T), 1))
    return ScoredSequence(topk_logps_TK, topk_ids_TK, -(response_T + offset).astype(np.float32))


class InstantTeacher:
    """A backend of the driver's process that returns `fake_scores` at once."""

    def hello(self, timeout_s: float) -> TeacherInfo:
        """Return the description of the fake engine."""
        return TeacherInfo(**vars(INFO), protocol_version=1, n_workers=1)

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        """Return the future of the scores, which is done."""
        scored: Future[list[ScoredSequence]] = Future()
        scored.set_result([fake_scores(sequence, 0) for sequence in sequences])
        return scored

    def restrict_ids(self, n_ids: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class OffsetEngine(FakeEngine):
    """A fake engine that returns `fake_scores` and rejects the token `REFUSED`."""

    def __init__(self, offset: int) -> None:
        sizes = dict(vocab_size=N_TOKENS, n_tokens=N_TOKENS, last_tokens=LAST_TOKENS)
        super().__init__(replace(INFO, max_model_len=MAX_MODEL_LEN, **sizes), capacity_tokens=2 * MAX_MODEL_LEN)
        self._offset = offset

    def check(self, sequence: TeacherSequence, temperature: float) -> None:
        if REFUSED in sequence.token_ids:
            raise TeacherRequestError(f"token {REFUSED} is rejected", argument="token_ids")

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        key, sequence = self._waiting.popitem()  # not in the order of arrival
        return [(key, fake_scores(sequence, self._offset))]


@contextmanager
def worker_of(proxy: Proxy, offset: int) -> Iterator[None]:
    """Run a worker for a proxy."""
    with running_worker(proxy.backend_port, OffsetEngine(offset)):
        yield


@contextmanager
def service(offset: int, port: int = 0) -> Iterator[int]:
    """Run a service with one worker and yield its port."""
    with running_proxy(port) as proxy, worker_of(proxy, offset):
        yield proxy.frontend_port


def pair(uid: int, tokens: Sequence[int] = (), *, reference: bool = False) -> tuple[Prompt, Response]:
    """Return a prompt and a response. Two consecutive uids share one row of the data."""
    ids = np.array(tokens or range(uid, uid + 1 + uid % 3), np.int32)
    prompt = Prompt(uid=uid, ids=np.array([5, 6], np.int32), row=uid // 2, reference_ids=ids if reference else None)
    zeros = np.zeros(len(ids), np.float32)
    return prompt, Response(
        uid=uid, ids=ids, logprobs=zeros, finish_reason="stop", weights_version=0, versions_T=zeros.astype(np.int32)
    )


def is_scored_by(offset: int, sample: Sample) -> bool:
    """Return True if the sample has the scores of the engine with this offset."""
    expected = fake_scores(TeacherSequence(sample.token_ids, len(sample.prompt.ids)), offset)
    return (
        not sample.is_skipped
        and np.array_equal(sample.top_k.ids_TK, expected.topk_ids_TK)
        and np.array_equal(sample.top_k.logps_TK, expected.topk_logps_TK)
        and np.array_equal(sample.teacher.sampled_logps_T, expected.sampled_logps_T)
    )
