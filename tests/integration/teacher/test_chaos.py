"""A real service under load, and somebody who kills, stops and restarts its processes.

In each test every answer arrives, once, and is the one of the service before anybody touched it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest

from teacher import ScoredSequence, TeacherClient, TeacherSequence
from tests._support.ports import free_port
from tests._support.teacher_service import MAX_MODEL_LEN, VOCAB_SIZE, processes_of, run_script

pytestmark = pytest.mark.timeout(150)

N_REQUESTS = 200


class Chaos:
    """A service of two workers, all of whose processes can be hurt, and the answers that it gave before that."""

    def __init__(self, ckpt_path: Path, run_dir: Path) -> None:
        self.run_dir, self.port, self.backend_port = run_dir, free_port(), free_port()
        self.model_flags = ("--ckpt-path", str(ckpt_path), "--dtype", "float32", "--n-logprobs", str(VOCAB_SIZE))
        self.model_flags += (
            "--logits-mib",
            "1",
            "--kv-cache-mib",
            "16",
            "--proxy-backend-port",
            str(self.backend_port),
        )
        self.proxy: subprocess.Popen[bytes] | None = None
        self.sequences = random_sequences()
        self.undisturbed: list[np.ndarray] = []

    def start(self) -> None:
        flags = ("--proxy-frontend-port", str(self.port), "--n-workers", "2", "--http-port", "-1")
        started = run_script("start_server.sh", *self.model_flags, *flags, "--run-dir", str(self.run_dir))
        assert started.returncode == 0, started.stdout + started.stderr
        with self.client() as client:
            self.undisturbed = [dense(future.result()[0]) for future in self.ask(client)]

    def join(self) -> subprocess.CompletedProcess[str]:
        return run_script("join_server.sh", *self.model_flags, "--run-dir", str(self.run_dir / "joined"))

    def stop(self) -> None:
        if self.proxy is not None:
            self.proxy.kill()
            self.proxy.wait(timeout=10)
        for run_dir in (self.run_dir / "joined", self.run_dir):
            run_script("stop_server.sh", "--run-dir", str(run_dir))
        assert processes_of(self.run_dir) == []

    def signal(self, name: str, number: int) -> None:
        os.kill(int((self.run_dir / f"{name}.pid").read_text().split()[0]), number)

    def restart_proxy(self) -> None:
        """Nobody is told."""
        self.signal("proxy", signal.SIGKILL)
        flags = ("--frontend-port", str(self.port), "--backend-port", str(self.backend_port), "--http-port", "-1")
        self.proxy = subprocess.Popen([sys.executable, "-m", "teacher", "proxy", *flags])

    def client(self, timeout_s: float = 60.0) -> TeacherClient:
        return TeacherClient(server_port=self.port, timeout_s=timeout_s)

    def ask(self, client: TeacherClient) -> list[Future[list[ScoredSequence]]]:
        return [client.submit([sequence]) for sequence in self.sequences]

    def check(self, futures: Sequence[Future[list[ScoredSequence]]], timeout_s: float = 60.0) -> None:
        """All have their answer, and the right one."""
        _, late = wait(futures, timeout_s)
        assert not late
        for future, want_TV in zip(futures, self.undisturbed, strict=True):
            (answer,) = future.result()
            np.testing.assert_allclose(dense(answer), want_TV, atol=1e-5)

    def n_workers(self, client: TeacherClient) -> int:
        return len(client.status().workers)


def random_sequences() -> list[TeacherSequence]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, MAX_MODEL_LEN + 1, N_REQUESTS)
    return [TeacherSequence(rng.integers(0, VOCAB_SIZE, n, np.int32), int(rng.integers(1, n))) for n in lengths]


def dense(answer: ScoredSequence) -> np.ndarray:
    """[T, V + 1]: logprobs by token id, and the sampled token's."""
    logps_TV = np.full((len(answer.topk_ids_TK), VOCAB_SIZE), np.nan)
    np.put_along_axis(logps_TV, answer.topk_ids_TK.astype(np.int64), answer.topk_logps_TK, axis=1)
    return np.column_stack([logps_TV, answer.sampled_logps_T])


def when_answered(futures: Sequence[Future[list[ScoredSequence]]], n: int, counted: Counter[int]) -> threading.Event:
    """Set once `n` of them are; `counted` says how often each was."""
    reached = threading.Event()

    def note(i: int) -> Callable[[Future[list[ScoredSequence]]], None]:
        def noted(_: Future[list[ScoredSequence]]) -> None:
            counted[i] += 1
            if len(counted) >= n:
                reached.set()

        return noted

    for i, future in enumerate(futures):
        future.add_done_callback(note(i))
    return reached


def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        threading.Event().wait(0.05)


@pytest.fixture(scope="module")
def chaos(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    running = Chaos(tiny_qwen2, tmp_path_factory.mktemp("chaos"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_a_worker_that_is_stopped_in_the_middle_loses_nothing_and_is_back_when_it_goes_on(chaos: Chaos) -> None:
    with chaos.client() as client:
        futures, counted = chaos.ask(client), Counter[int]()
        assert when_answered(futures, 20, counted).wait(30)
        began = time.monotonic()
        chaos.signal("worker-0", signal.SIGSTOP)
        try:
            chaos.check(futures)
            assert time.monotonic() - began < 20
            until(lambda: chaos.n_workers(client) == 1)
        finally:
            chaos.signal("worker-0", signal.SIGCONT)
        until(lambda: chaos.n_workers(client) == 2)
        assert set(counted.values()) == {1}
        chaos.check(chaos.ask(client))


def test_a_proxy_that_is_killed_and_started_again_loses_nothing(chaos: Chaos) -> None:
    with chaos.client() as client:
        futures, counted = chaos.ask(client), Counter[int]()
        assert when_answered(futures, 20, counted).wait(30)
        chaos.restart_proxy()
        chaos.check(futures)
        until(lambda: chaos.n_workers(client) == 2)
        assert set(counted.values()) == {1} and len(counted) == N_REQUESTS


def test_two_clients_at_once_and_one_that_vanishes(chaos: Chaos) -> None:
    with chaos.client() as one, chaos.client() as other:
        command = [sys.executable, "-c", VANISHING, str(chaos.port)]
        vanishing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert vanishing.stdout is not None and vanishing.stdout.readline() == "asked\n"
            futures = [chaos.ask(client) for client in (one, other)]
        finally:
            vanishing.kill()
            vanishing.wait(timeout=10)
            vanishing.stdout.close()
        for own in futures:
            chaos.check(own)
        until(lambda: not one.status().queue_requests and not any(worker.requests for worker in one.status().workers))


VANISHING = """
import sys, time
import numpy as np
from teacher import TeacherClient, TeacherSequence
client = TeacherClient(server_port=int(sys.argv[1]))
client.hello()
for _ in range(2000):
    client.submit([TeacherSequence(np.arange(60, dtype=np.int32), 1)])
time.sleep(0.1)
print("asked", flush=True)
time.sleep(60)
"""


def test_killed_workers_lose_nothing_and_with_none_left_requests_wait_for_the_next(chaos: Chaos) -> None:
    """Kill -9 of one in the middle; then of the other; then a new one joins."""
    with chaos.client() as client:
        futures, counted = chaos.ask(client), Counter[int]()
        assert when_answered(futures, 20, counted).wait(30)
        chaos.signal("worker-0", signal.SIGKILL)
        chaos.check(futures)
        assert set(counted.values()) == {1}

        futures = chaos.ask(client)
        assert when_answered(futures, 20, Counter()).wait(30)
        chaos.signal("worker-1", signal.SIGKILL)
        until(lambda: chaos.n_workers(client) == 0)
        assert not all(future.done() for future in futures)
        joined = chaos.join()
        assert joined.returncode == 0, joined.stderr
        chaos.check(futures)
        status = client.status()
        assert status.totals.given_up == 0 and status.totals.workers_lost == 2 and len(status.workers) == 1
