"""Simulated engines, actor ranks and teacher of ``scale.py``: they take time, and produce arrays of the right size.

Everything between them is real: Ray, the driver's training loop, the scoring workers, the teacher's proxy and protocol.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
from teacher_processes import TIMEOUT_S, free_port

from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.teachers.scoring.fetch import with_top_k
from teacher import ScoredSequence, TeacherRequestError, TeacherSequence
from teacher.proxy import Proxy
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.records import LogitSettings, ModelInfo
from teacher.stop_signal import StopSignal
from teacher.worker import Worker

VOCABULARY = 150_000
PROMPT_TOKENS = 64
GENERATE_CHUNKS = 8
"""Times at which the responses of a replica finish, evenly spread."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work of one step.

    Attributes:
        responses: Responses per step.
        mean_tokens: Mean length of a response. Lengths are lognormal, up to four times the mean.
        k: Teacher's top-k.
        generate_s: Duration of the generation of a step's responses.
        teacher_s: Duration of their scoring.
        update_s: Duration of an update.
    """

    responses: int
    mean_tokens: int
    k: int
    generate_s: float
    teacher_s: float
    update_s: float

    @property
    def max_tokens(self) -> int:
        """Length of the longest response."""
        return 4 * self.mean_tokens

    @property
    def tokens(self) -> int:
        """Expected number of response tokens of a step."""
        return self.responses * self.mean_tokens

    def length_of(self, uid: int) -> int:
        """Return the length of a response, which depends on its uid alone."""
        length = np.random.default_rng(uid).lognormal(np.log(self.mean_tokens) - 0.125, 0.5)
        return int(np.clip(length, 1, self.max_tokens))


class SimulatedRollouts:
    """Ray actor that stands in for rollout workers.

    Args:
        load: Work of one step.
    """

    def __init__(self, load: Load) -> None:
        self._load = load

    async def generate(self, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        """Yield random responses in several groups."""
        size = max(1, len(prompts) // GENERATE_CHUNKS)
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        for group in groups:
            await asyncio.sleep(self._load.generate_s / len(groups))
            yield [self._response(prompt.uid, step) for prompt in group]

    def _response(self, uid: int, step: int) -> Response:
        n_tokens, rng = self._load.length_of(uid), np.random.default_rng(uid)
        return Response(
            uid=uid,
            ids=rng.integers(0, VOCABULARY, n_tokens, dtype=np.int32),
            logprobs=-rng.random(n_tokens, dtype=np.float32),
            finish_reason="stop",
            weights_version=step,
            versions_T=np.full(n_tokens, step, np.int32),
        )

    def shutdown(self) -> None:
        """Do nothing."""


class SimulatedActors:
    """Ray actor that stands in for actor ranks.

    Args:
        load: Work of one step.
    """

    def __init__(self, load: Load) -> None:
        self._load = load

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Read the shard and the teacher's rows as an actor rank does, and return their sizes."""
        began = time.monotonic()
        samples = with_top_k(samples, TIMEOUT_S)
        rows = [sample.top_k for sample in samples]
        assert all(len(top_k.ids_TK) == len(s.response.ids) for top_k, s in zip(rows, samples, strict=True))
        fetched_s = time.monotonic() - began
        time.sleep(max(0.0, self._load.update_s - fetched_s))
        return {"fetch_s": fetched_s, "row_bytes": float(sum(top_k.n_bytes for top_k in rows))}

    def shutdown(self) -> None:
        """Do nothing."""


class SimulatedSync:
    """Weight sync without weights."""

    async def sync(self, version: int) -> dict[str, float]:
        """Return at once."""
        return {"timing/sync_rollout_weights": 0.0}


class SimulatedEngine:
    """Engine of the teacher that returns slices of prepared arrays.

    Args:
        load: Work of one step.
    """

    logits = LogitSettings()
    capacity_tokens = 1 << 18
    has_sleep_mode = False

    def __init__(self, load: Load) -> None:
        n_rows, k = load.max_tokens, load.k
        self.info = ModelInfo("simulated", VOCABULARY, VOCABULARY, "none", n_rows + PROMPT_TOKENS, k, "simulated", (1,))
        ranks_K = np.arange(1, k + 1, dtype=np.float32)
        self._logps_TK = np.tile(np.log(0.9 / ranks_K / (1 / ranks_K).sum()), (n_rows, 1)).astype(np.float32)
        self._ids_TK = np.tile(np.arange(k, dtype=np.int32), (n_rows, 1))
        self._s_per_token = load.teacher_s / load.tokens
        self._waiting: deque[tuple[int, int]] = deque()

    def set_logits(self, settings: LogitSettings) -> None:
        """Accept any settings."""

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        """Accept any sequence."""

    def add(self, key: int, sequence: TeacherSequence) -> None:
        """Queue a sequence."""
        self._waiting.append((key, len(sequence.token_ids) - sequence.prompt_len))

    def discard(self, keys: list[int]) -> None:
        """Remove sequences from the queue."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in keys)

    def has_work(self) -> bool:
        """Return True if sequences are queued."""
        return bool(self._waiting)

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        """Score the oldest sequence."""
        key, n_rows = self._waiting.popleft()
        time.sleep(n_rows * self._s_per_token)
        scored = ScoredSequence(self._logps_TK[:n_rows], self._ids_TK[:n_rows], self._logps_TK[:n_rows, 0].copy())
        return [(key, scored)]

    def close(self) -> None:
        """Do nothing."""


def _run_proxy(ports: tuple[int, int], ready: Event) -> None:
    stop = StopSignal()
    proxy = Proxy("127.0.0.1", *ports, sockets=SocketSettings())
    ready.set()
    proxy.run(stop)


def _run_worker(port: int, load: Load, ready: Event) -> None:
    stop = StopSignal()
    Worker(SimulatedEngine(load), backend_port=port).run(stop, on_registered=ready.set)


@contextmanager
def running_teacher(load: Load) -> Iterator[int]:
    """Run a proxy and a teacher worker in separate processes, and yield the port of the service."""
    context = multiprocessing.get_context("spawn")
    ports = free_port(), free_port()
    targets: list[tuple[Any, tuple[Any, ...]]] = [(_run_proxy, (ports,)), (_run_worker, (ports[1], load))]
    processes: list[BaseProcess] = []
    try:
        for target, arguments in targets:
            ready = context.Event()
            processes.append(context.Process(target=target, args=(*arguments, ready), daemon=True))
            processes[-1].start()
            if not ready.wait(TIMEOUT_S):
                raise RuntimeError(f"{target.__name__} did not start within {TIMEOUT_S:g} s")
        yield ports[0]
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.join(10)
            process.kill()
