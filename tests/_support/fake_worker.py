"""Worker with a fake engine that computes nothing, for tests of queueing, deadlines and errors.

``python -m tests._support.fake_worker BACKEND_PORT`` runs such a worker in its own process, for tests that kill it. It
prints every sequence that it gets on stdout, and scores nothing before SIGUSR1.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from teacher.errors import TeacherError, TeacherRequestError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherSequence
from teacher.worker import Worker
from tests._support.teacher_service import StopFlag
from tests._support.waiting import PATIENCE_S

INFO = ModelInfo(
    "fake",
    vocab_size=100,
    n_tokens=100,
    tokenizer_fingerprint="none",
    max_model_len=32,
    n_logprobs=4,
    engine="fake",
    eos_token_ids=(1, 7),
)


TOO_COLD = 0.125


def expected_scores(sequence: TeacherSequence, temperature: float = 1.0) -> ScoredSequence:
    """Return scores that depend on every token, its position and the temperature, so that a mix-up is detected."""
    response_T = sequence.scored_ids_T
    topk_ids_TK = (response_T[:, None] + np.arange(4, dtype=np.int32)) % 100
    topk_logps_TK = -topk_ids_TK.astype(np.float32) / np.float32(temperature)
    sampled_T = -response_T.astype(np.float32) / np.float32(temperature)
    if sequence.support_ids_TJ is None:
        return ScoredSequence(topk_logps_TK, topk_ids_TK, sampled_T)
    k = slice(None if sequence.with_top_k else 0)
    support_TJ = -(sequence.support_ids_TJ + response_T[:, None]).astype(np.float32) / np.float32(temperature)
    return ScoredSequence(topk_logps_TK[:, k], topk_ids_TK[:, k], sampled_T, support_TJ)


class FakeEngine:
    """Engine that scores one sequence per step while `gate` is set, newest first, so that results are out of order.

    A step raises for token 99 and refuses token 98. ``check`` refuses the temperature TOO_COLD. ``sleep`` and ``wake``
    last until `sleep_gate` is set.

    Attributes:
        gate: Event that lets steps score.
        added: Semaphore that counts the added sequences.
        n_scored: Number of scored sequences.
        temperatures: All temperatures so far, the current one last.
        has_sleep_mode: True if it was started with its sleep mode.
        is_asleep: True between ``sleep`` and ``wake``.
        sleep_gate: Event that ends ``sleep`` and ``wake``.
        wake_error: Error of ``wake``.
    """

    has_sleep_mode = True

    def __init__(self, info: ModelInfo = INFO, capacity_tokens: int = 1000) -> None:
        self.info, self.capacity_tokens = info, capacity_tokens
        self.gate = threading.Event()
        self.gate.set()
        self.added = threading.Semaphore(0)
        self.n_scored = 0
        self.temperatures = [1.0]
        self.logits = LogitSettings()
        self.is_asleep = False
        self.sleep_gate = threading.Event()
        self.sleep_gate.set()
        self.wake_error: TeacherError | None = None
        self._waiting: dict[int, TeacherSequence] = {}

    @property
    def temperature(self) -> float:
        return self.temperatures[-1]

    def set_logits(self, settings: LogitSettings) -> None:
        if self._waiting:
            raise RuntimeError(f"{settings} was set with {len(self._waiting)} sequences of others in the engine")
        self.temperatures.append(settings.temperature)
        self.logits = settings

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        if settings.temperature == TOO_COLD:
            raise TeacherRequestError(
                f"temperature {settings.temperature} is not for this model", argument="temperature"
            )
        if sequence.token_ids.max() >= self.info.vocab_size:
            raise TeacherRequestError(
                f"token id {sequence.token_ids.max()} is outside the vocabulary", argument="token_ids"
            )

    def add(self, key: int, sequence: TeacherSequence) -> None:
        assert not self.is_asleep
        self._waiting[key] = sequence
        self.added.release()

    def discard(self, keys: list[int]) -> None:
        for key in keys:
            self._waiting.pop(key, None)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        if not self.gate.wait(timeout=0.01):
            return []
        key, sequence = self._waiting.popitem()
        if 99 in sequence.token_ids:
            raise RuntimeError("the device fell off the bus")
        if 98 in sequence.token_ids:
            return [(key, TeacherRequestError("the engine refused the request: 98"))]
        self.n_scored += 1
        return [(key, expected_scores(sequence, self.temperature))]

    def sleep(self) -> None:
        assert not self.is_asleep and not self._waiting
        assert self.sleep_gate.wait(timeout=PATIENCE_S)
        self.is_asleep = True

    def wake(self) -> None:
        assert self.is_asleep and self.sleep_gate.wait(timeout=PATIENCE_S)
        if self.wake_error is not None:
            raise self.wake_error
        self.is_asleep = False

    def close(self) -> None:
        self._waiting.clear()


class RunningWorker:
    """Worker in a thread.

    Attributes:
        error: Exception raised by its ``run``.
        settled: Event that is set when it has registered or ended.
    """

    def __init__(
        self,
        backend_port: int,
        engine: FakeEngine,
        stall_timeout_s: float | None = None,
        auth_dir: Path | None = None,
    ) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self.settled = threading.Event()
        self._stop = StopFlag()
        self._worker = Worker(engine, backend_port=backend_port, stall_timeout_s=stall_timeout_s, auth_dir=auth_dir)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._worker.run(self._stop, register_timeout_s=10, on_registered=self.settled.set)
        except (RuntimeError, TeacherError) as error:
            self.error = error
        finally:
            self.settled.set()

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(timeout=PATIENCE_S)
        assert not self.thread.is_alive()
        self._stop.close()


@contextmanager
def running_worker(
    backend_port: int,
    engine: FakeEngine | None = None,
    stall_timeout_s: float | None = None,
    auth_dir: Path | None = None,
) -> Iterator[RunningWorker]:
    """Yield a worker that has registered or was refused, and stop it."""
    worker = RunningWorker(backend_port, engine or FakeEngine(), stall_timeout_s, auth_dir)
    try:
        assert worker.settled.wait(timeout=PATIENCE_S)
        yield worker
    finally:
        worker.stop()


OTHER_INFO = replace(INFO, tokenizer_fingerprint="another")


class HeldEngine(FakeEngine):
    """Engine of the script: it prints added sequences, and scores after SIGUSR1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()
        signal.signal(signal.SIGUSR1, lambda *_: self.gate.set())

    def add(self, key: int, sequence: TeacherSequence) -> None:
        super().add(key, sequence)
        print(f"added {key}", flush=True)


if __name__ == "__main__":
    Worker(HeldEngine(), backend_port=int(sys.argv[1])).run(StopFlag())
